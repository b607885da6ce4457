"""`python -m fastjax.generate` on a tiny model, against transformers' generate and chat templates."""

import json
import shutil

import pytest

from fastjax.generate import main

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NEW = "8"


@pytest.fixture(scope="module")
def parts(tiny_hf, tmp_path_factory):
    """(folder, transformers model, tokenizer): bytes, ChatML and a BOS that template and post-processor both write."""
    pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, bos_token="<s>", eos_token="<|im_end|>"
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_hf(seed=3, scale=0.3, vocab_size=260, max_position_embeddings=96, eos_token_id=258, bos_token_id=256)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.fixture
def ask(parts, capsys):
    """ask(*flags): exit code, stdout and stderr of the command on the tiny model."""

    def run(*flags, model=parts[0]):
        flags = [str(flag) for flag in flags]
        defaults = {"--model": str(model), "--dtype": "float32", "--max_new_tokens": NEW}
        chosen = [word for name, value in defaults.items() if name not in flags for word in (name, value)]
        return main([*chosen, *flags]), *capsys.readouterr()

    return run


def expected_ids(parts, ids, model=None):
    import torch

    model = model or parts[1]
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=int(NEW),
            do_sample=False, pad_token_id=0, eos_token_id=258,
        )  # fmt: skip
    return out[0, len(ids) :].tolist()


def chat_ids(parts, messages):
    tokenizer = parts[2]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def text_of(parts, ids):
    return parts[2].decode(ids, skip_special_tokens=True)


def user(text):
    return [{"role": "user", "content": text}]


def test_one_prompt_goes_through_the_chat_template(parts, ask):
    code, out, err = ask("--prompt", "hello")
    assert code == 0
    assert out == text_of(parts, expected_ids(parts, chat_ids(parts, user("hello")))) + "\n"
    assert "chat template" in err and "<|im_end|>" not in out


def test_raw_prompts_get_one_bos_and_nothing_else(parts, ask):
    ids = [256, *parts[2]("hello", add_special_tokens=False)["input_ids"]]
    code, out, _ = ask("--prompt", "hello", "--raw", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["num_prompt_tokens"] == len(ids) == 6
    assert answer["text"] == text_of(parts, expected_ids(parts, ids))


ROWS = [
    {"prompt": "a"},
    {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is the time"}]},
    {"prompt": "the cat sat on", "id": 7},
]


def write_rows(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_file_of_prompts_is_answered_in_its_order(parts, ask, tmp_path):
    file = write_rows(tmp_path / "prompts.jsonl", ROWS)
    code, out, _ = ask("--prompts", file, "--json", "--batch_size", 2)
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(answers) == 3
    for row, answer in zip(ROWS, answers, strict=True):
        messages = row.get("messages") or user(row["prompt"])
        prompt = chat_ids(parts, messages)
        ids = expected_ids(parts, prompt)
        assert answer == {
            "prompt": row.get("messages") or row["prompt"],
            "text": text_of(parts, ids),
            "num_prompt_tokens": len(prompt),
            "num_new_tokens": len(ids),
            "finish_reason": "stop" if ids[-1] == 258 else "length",
        }


def test_output_is_written_whole(parts, ask, tmp_path, monkeypatch):
    file, target = write_rows(tmp_path / "prompts.jsonl", ROWS), tmp_path / "answers.jsonl"
    code, out, err = ask("--prompts", file, "--output", target)
    assert code == 0 and out == "" and f"wrote 3 answers to {target}" in err
    first = target.read_text()
    assert [json.loads(line)["prompt"] for line in first.splitlines()][0] == "a"

    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [[5]]

    monkeypatch.setattr("fastjax.models.generation.generate", broken)
    code, _, _ = ask("--prompts", file, "--output", target, "--batch_size", 1)
    assert code == 130 and target.read_text() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


def test_every_eos_of_generation_config_ends_an_answer(parts, ask, tmp_path):
    folder = shutil.copytree(parts[0], tmp_path / "model")
    full = expected_ids(parts, chat_ids(parts, user("hello")))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, full[3]]}))
    _, out, _ = ask("--prompt", "hello", "--json", model=folder)
    answer = json.loads(out)
    assert answer["num_new_tokens"] == full.index(full[3]) + 1 and answer["finish_reason"] == "stop"


def test_an_adapter_with_its_own_template(parts, ask, tmp_path):
    peft = pytest.importorskip("peft")
    import copy

    import torch

    folder, hf_model, tokenizer = parts
    adapted = peft.get_peft_model(copy.deepcopy(hf_model), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ bos_token }}Q: {{ messages[0]['content'] }}{% if add_generation_prompt %} A:{% endif %}"
    own.save_pretrained(tmp_path / "adapter")
    ids = [256, *tokenizer("Q: hello A:", add_special_tokens=False)["input_ids"]]
    code, out, _ = ask("--adapter", tmp_path / "adapter", "--prompt", "hello")
    assert code == 0
    assert out == text_of(parts, expected_ids(parts, ids, adapted.eval())) + "\n"
    assert out != text_of(parts, expected_ids(parts, ids)) + "\n"


def test_without_a_model_the_commands_take_the_one_that_the_adapter_names(parts, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    import copy

    from fastjax import evaluate, export

    folder, hf_model, tokenizer = parts
    adapted = peft.get_peft_model(copy.deepcopy(hf_model), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapter = str(tmp_path / "adapter")
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(adapter)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    dtype = ["--dtype", "float32"]
    commands = (
        (main, ["--prompt", "hello", "--max_new_tokens", NEW, *dtype]),
        (evaluate.main, ["--data", str(rows), *dtype]),
        (export.main, ["--output_dir", str(tmp_path / "merged")]),
    )
    for command, flags in commands:
        assert command(["--adapter", adapter, *flags]) == 0
        out, err = capsys.readouterr()
        assert out and f"the base model is {folder}, as {adapter} says" in err
        assert command(flags) == 2
        assert "model is missing" in capsys.readouterr().err
    # The base is what is read, so it is not replaced either.
    assert export.main(["--adapter", adapter, "--output_dir", str(folder), "--overwrite_output_dir"]) == 2


def test_sampling_is_reproducible_and_seeded(ask):
    flags = ("--prompt", "hello", "--temperature", "1.5", "--top_k", "50", "--top_p", "0.9", "--min_p", "0.01")
    first = ask(*flags)
    assert ask(*flags) == first and ask(*flags, "--seed", 1)[1] != first[1]


def test_filters_that_change_nothing_without_a_temperature_are_told(ask):
    code, out, err = ask("--prompt", "hello", "--top_p", "0.9")
    assert code == 0 and out == ask("--prompt", "hello")[1]
    assert "temperature=0 takes the most likely token, so top_p filters nothing" in err


def test_long_answers_are_cut_at_the_model_s_limit(ask):
    code, out, err = ask("--prompt", "x" * 80, "--raw", "--json", "--max_new_tokens", 128)
    assert code == 0
    assert json.loads(out)["num_new_tokens"] <= 96 - 81
    assert "may stop before max_new_tokens=128" in err and "at most 96 tokens" in err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": ', "broken JSON"),
        ({"text": "hello"}, "not a prompt (keys seen: text)"),
        ({"prompt": 5}, "not a prompt"),
        ({"prompt": "a", "messages": []}, "not a prompt"),
        (["a"], "not a prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "role 'king' is not known"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "leave it out"),
        ({"prompt": "x" * 200}, "tokens and rows hold at most 96"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(ask, tmp_path, row, words):
    file = write_rows(tmp_path / "prompts.jsonl", [ROWS[0], row])
    target = tmp_path / "out.jsonl"
    code, out, err = ask("--prompts", file, "--output", target)
    assert code == 2 and out == "" and not target.exists()
    assert f"{file}:2" in err and words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "neither of prompt and prompts"),
        (["--prompt", "a", "--prompts", "b"], "both of prompt and prompts"),
        (["--prompt", "a", "--chat", "--raw"], "chat and raw are both given"),
        (["--prompt", "a", "--top_p", "1.5"], "top_p=1.5 must lie in [0, 1]"),
        (["--prompt", "a", "--min_p", "1.5"], "min_p=1.5 must lie in [0, 1]"),
        (["--prompt", "a", "--temperature=-1"], "temperature=-1.0"),
        (["--prompt", "a", "--top_k=-1"], "top_k=-1"),
        (["--prompts", "missing.jsonl"], "prompts='missing.jsonl' is not a file"),
        (["--prompt", "a", "--output", "missing/out.jsonl"], "output='missing/out.jsonl'"),
        (["--prompt", "a", "--adapter", "missing"], "adapter='missing'"),
        (["--prompt", "a", "--temprature", "1"], "did you mean --temperature"),
        (["--prompt", "a", "--dtype", "float16"], "float16"),
    ],
)
def test_settings_that_cannot_be_are_two_lines_and_exit_code_2(ask, flags, words):
    code, out, err = ask(*flags)
    assert code == 2 and out == "" and words in err and len(err.splitlines()) <= 3


def test_without_a_template_chat_is_refused_and_text_is_continued(parts, ask, tmp_path):
    folder = shutil.copytree(parts[0], tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    code, _, err = ask("--prompt", "hello", "--chat", model=folder)
    assert code == 2 and "no chat template" in err
    file = write_rows(tmp_path / "prompts.jsonl", [ROWS[1]])
    code, _, err = ask("--prompts", file, model=folder)
    assert code == 2 and f"{file}:1" in err
    code, out, err = ask("--prompt", "hello", model=folder)
    ids = [256, *parts[2]("hello", add_special_tokens=False)["input_ids"]]
    assert code == 0 and "no chat template" in err and out == text_of(parts, expected_ids(parts, ids)) + "\n"


def test_an_empty_raw_prompt_is_only_a_bos(parts, ask):
    code, out, _ = ask("--prompt", "", "--raw", "--json")
    assert code == 0 and json.loads(out)["num_prompt_tokens"] == 1
