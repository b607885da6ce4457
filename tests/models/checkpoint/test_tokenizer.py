"""Tokenizers against AutoTokenizer: ids, special tokens, chat templates, GGUF, and nothing of torch."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastjax.errors import UserError
from fastjax.models.checkpoint import tokenizer as module
from fastjax.models.checkpoint.tokenizer import load_tokenizer, save_tokenizer

CORPUS = [
    "Hello world, how are you? I'm fine, thanks. 12 plus 345 is 357.",
    "The capital of France is Paris, and 2024 was a leap year.",
    "def add(x, y):\n    return x + y\n\nprint(add(1, 22))",
]
TEXTS = [
    "Hello world, I'm 12 years and 345 days old!", "", "x", "\n\nnew\tlines\n", "héllo 🙂 Ünïcode", "12 345 6789",
    "def f(x):\n    return x", "a<s>b</s> c", "<|im_start|>user\nhi<|im_end|>\n", "HE'LL go", " one leading space",
    "  two leading spaces", "<s>[INST] hi [/INST] there </s>",
]  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CHAT = [{"role": "user", "content": "Hello world"}, {"role": "assistant", "content": "12"}]


def byte_level(pre: list, special: list[str], tokenizer_config: dict, bos: str | None = None) -> Callable[[Path], None]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre)
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return lambda folder: write(folder, tokenizer, tokenizer_config)


def write(folder: Path, tokenizer: Any, tokenizer_config: dict, model_type: str = "llama") -> None:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def smollm2_like(folder: Path) -> None:
    from tokenizers import pre_tokenizers

    pre = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
              "pad_token": "<|im_end|>", "tokenizer_class": "GPT2Tokenizer", "chat_template": TEMPLATE,
              "clean_up_tokenization_spaces": False, "add_prefix_space": False}  # fmt: skip
    byte_level(pre, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], config)(folder)


def llama3_like(folder: Path) -> None:
    from tokenizers import Regex, pre_tokenizers

    from fastjax.models.checkpoint.gguf_tokenizer import _LLAMA3

    pre = [pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"),
           pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]  # fmt: skip
    config = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast",
              "clean_up_tokenization_spaces": True, "model_input_names": ["input_ids", "attention_mask"]}  # fmt: skip
    byte_level(pre, ["<|begin|>", "<|im_start|>", "<|im_end|>"], config, bos="<|begin|>")(folder)


def llama2_like(folder: Path, model_type: str = "llama", **changes: Any) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special + byte_tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer",
              "clean_up_tokenization_spaces": False, "legacy": False, **changes}  # fmt: skip
    write(folder, tokenizer, config, model_type)


FOLDERS: dict[str, Callable[[Path], None]] = {
    "SmolLM2": smollm2_like,
    "Llama 3": llama3_like,
    "Llama 2": llama2_like,
    "Llama 2 legacy": lambda folder: llama2_like(folder, legacy=True, add_bos_token=True, add_eos_token=False),
    "Llama 2 without bos": lambda folder: llama2_like(folder, add_bos_token=False),
    "Llama 2 with eos": lambda folder: llama2_like(folder, add_bos_token=True, add_eos_token=True),
    "Llama 2 without a prefix": lambda folder: llama2_like(
        folder, tokenizer_class="LlamaTokenizerFast", add_prefix_space=False
    ),
    "Mistral": lambda folder: llama2_like(folder, model_type="mistral"),
    "no class": lambda folder: llama2_like(folder, tokenizer_class=None),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_ids_and_text_are_those_of_autotokenizer(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    FOLDERS[kind](tmp_path / "t")
    ours, theirs = load_tokenizer(tmp_path / "t"), AutoTokenizer.from_pretrained(tmp_path / "t")
    for text in TEXTS:
        for special in (True, False):
            ids = ours(text, add_special_tokens=special)["input_ids"]
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    # What is written is read back as the same tokenizer, by AutoTokenizer too.
    save_tokenizer(ours, tmp_path / "t")
    for again in (load_tokenizer(tmp_path / "t"), AutoTokenizer.from_pretrained(tmp_path / "t")):
        assert [again(text)["input_ids"] for text in TEXTS] == [ours(text)["input_ids"] for text in TEXTS]


def test_digits_are_split_as_tokenizer_json_says_whatever_class_is_named(tmp_path: Path) -> None:
    smollm2_like(tmp_path / "t")
    tokens = load_tokenizer(tmp_path / "t").tokenize("in  1995")
    assert tokens[-4:] == ["1", "9", "9", "5"] and "Ġ1" not in tokens


# Chat templates: the file wins over tokenizer_config.json, both are read, both are written.


def test_a_template_is_read_from_either_place_and_the_file_wins(tmp_path: Path) -> None:
    smollm2_like(tmp_path / "t")
    assert load_tokenizer(tmp_path / "t").chat_template == TEMPLATE
    (tmp_path / "t/chat_template.jinja").write_text("from the file" + TEMPLATE)
    assert load_tokenizer(tmp_path / "t").chat_template == "from the file" + TEMPLATE
    config = json.loads((tmp_path / "t/tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path / "t").chat_template == "from the file" + TEMPLATE
    (tmp_path / "t/chat_template.jinja").unlink()
    assert load_tokenizer(tmp_path / "t").chat_template is None


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_saved_template_gives_the_same_ids_from_either_place(place: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    smollm2_like(tmp_path / "t")
    tokenizer = load_tokenizer(tmp_path / "t")
    (tmp_path / "out").mkdir()
    save_tokenizer(tokenizer, tmp_path / "out")
    if place == "tokenizer_config.json":
        (tmp_path / "out/chat_template.jinja").unlink()
    else:
        config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
        del config["chat_template"]
        (tmp_path / "out/tokenizer_config.json").write_text(json.dumps(config))
    expected = tokenizer.apply_chat_template(CHAT, return_dict=False)
    for again in (load_tokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")):
        assert again.apply_chat_template(CHAT, return_dict=False) == expected


def test_a_saved_tokenizer_names_a_class_that_every_program_reads_as_it_stands(tmp_path: Path) -> None:
    smollm2_like(tmp_path / "t")
    save_tokenizer(load_tokenizer(tmp_path / "t"), tmp_path / "t")
    written = json.loads((tmp_path / "t/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"is_local", "local_files_only"} & set(written)


# SentencePiece models, missing and broken files.


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    (folder / "corpus").write_text("\n".join(CORPUS * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus"), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=360,
        byte_fallback=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    return folder / "tokenizer.model"


def test_a_folder_with_only_tokenizer_model_needs_the_extra(
    sentencepiece_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(sentencepiece_model, tmp_path / "tokenizer.model")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "sentencepiece" else find_spec(name))
    with pytest.raises(
        UserError, match=r"only a tokenizer.model, which needs sentencepiece; .*fastjax\[sentencepiece\]"
    ):
        load_tokenizer(tmp_path)
    # `google` may be missing as a whole.
    assert module._installed("no_such_package.protobuf") is False


def test_a_tokenizer_model_is_read_as_autotokenizer_does(sentencepiece_model: Path, tmp_path: Path) -> None:
    import sentencepiece
    from transformers import AutoTokenizer

    shutil.copy(sentencepiece_model, tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert [ours(text)["input_ids"] for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]
    owner = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    text = "Hello world, I'm 12 years old"
    assert ours(text, add_special_tokens=False)["input_ids"] == owner.encode(text)


def test_missing_and_broken_tokenizers_are_user_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(tmp_path)
    for content in ("{", '{"model": 3}', "[]"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match="tokenizer.json"):
            load_tokenizer(tmp_path)


def test_a_tokenizer_class_that_is_no_name_is_refused_by_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for file in ("tokenizer_config.json", "config.json"):
        (tmp_path / file).write_text('{"tokenizer_class": 5}')
        with pytest.raises(UserError, match=f"{file}: tokenizer_class=5 must be the name of a class"):
            load_tokenizer(tmp_path)
        (tmp_path / file).unlink()
    (tmp_path / "tokenizer_config.json").mkdir()
    with pytest.raises(UserError, match="tokenizer_config.json cannot be read: Is a directory"):
        load_tokenizer(tmp_path)


# GGUF.


def gguf_of(path: Path, source: Path, kind: str, pre: str | None = None, **flags: bool) -> Path:
    """A GGUF file with the vocabulary of a tokenizer.json and no tensors."""
    from gguf import GGUFWriter

    state = json.loads((source / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"] | {token["content"]: token["id"] for token in state["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token["content"] for token in state["added_tokens"]}
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 6 if token.startswith("<0x") else 1 for token in tokens])
    if kind == "llama":
        # SentencePiece's scores fall with the order in which pieces were merged; tokenizers numbers them so.
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
        writer.add_tokenizer_pre(pre or "gpt-2")
    for name, add in (("add_bos_token", writer.add_add_bos_token), ("add_space_prefix", writer.add_add_space_prefix)):
        if name in flags:
            add(flags[name])
    special = json.loads((source / "tokenizer_config.json").read_text())
    writer.add_bos_token_id(vocab[special["bos_token"]])
    writer.add_eos_token_id(vocab[special["eos_token"]])
    if "unk_token" in special:
        writer.add_unk_token_id(vocab[special["unk_token"]])
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("make", "kind", "pre", "flags"),
    [
        (smollm2_like, "gpt2", "smollm", {"add_bos_token": False}),
        (llama3_like, "gpt2", "llama-bpe", {"add_bos_token": True}),
    ],
)
def test_a_byte_level_gguf_tokenizer_is_that_of_the_folder_it_came_from(
    make: Callable, kind: str, pre: str, flags: dict, tmp_path: Path
) -> None:
    make(tmp_path / "t")
    original, ours = (
        load_tokenizer(tmp_path / "t"),
        load_tokenizer(gguf_of(tmp_path / "m.gguf", tmp_path / "t", kind, pre, **flags)),
    )
    assert ours.chat_template == TEMPLATE
    for text in [*TEXTS, "in  1995", "1,000,000"]:
        assert ours(text)["input_ids"] == original(text)["input_ids"], text
        assert ours.decode(ours(text)["input_ids"]) == original.decode(original(text)["input_ids"])


def test_a_sentencepiece_gguf_tokenizer_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    llama2_like(tmp_path / "t")
    path = gguf_of(tmp_path / "m.gguf", tmp_path / "t", "llama")
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, values, settings = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, values)
    ours = load_tokenizer(path)
    assert settings["add_bos_token"] is True
    for text in TEXTS:
        assert ours(text, add_special_tokens=False)["input_ids"] == theirs.encode(text, add_special_tokens=False).ids, (
            text
        )
        assert ours(text)["input_ids"] == [1, *theirs.encode(text, add_special_tokens=False).ids]
    folder_ids = AutoTokenizer.from_pretrained(tmp_path / "t")("Hello world, I'm 12")["input_ids"]
    assert ours("Hello world, I'm 12")["input_ids"] == folder_ids


def test_a_gguf_tokenizer_that_is_not_known_says_so(tmp_path: Path) -> None:
    smollm2_like(tmp_path / "t")
    with pytest.warns(UserWarning, match="pre-tokenizer 'novel' is not known"):
        load_tokenizer(gguf_of(tmp_path / "a.gguf", tmp_path / "t", "gpt2", "novel"))
    state = json.loads((tmp_path / "t/tokenizer.json").read_text())
    state["model"]["merges"].append(["no", "such"])
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="its tokenizer cannot be built"):
        load_tokenizer(gguf_of(tmp_path / "c.gguf", tmp_path / "t", "gpt2"))
    with pytest.raises(UserError, match="tokenizer of the kind 'bert'"):
        load_tokenizer(gguf_of(tmp_path / "b.gguf", tmp_path / "t", "bert"))


@pytest.mark.slow
def test_the_real_smollm2_tokenizer_is_that_of_transformers_and_its_template_too(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(smollm2)
    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    for text in [*TEXTS, *CORPUS]:
        # Two blanks before a digit are where transformers forgets that this vocabulary splits digits off first.
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert ours.tokenize("in  1995") == ["in", "ĠĠ", "1", "9", "9", "5"]
    chat = {"add_generation_prompt": True, "return_dict": False}
    assert ours.apply_chat_template(CHAT, **chat) == theirs.apply_chat_template(CHAT, **chat)
    assert (ours.eos_token, ours.pad_token, len(ours)) == ("<|im_end|>", "<|im_end|>", 49152)


def test_reading_checkpoints_and_tokenizers_never_imports_torch(hf_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    smollm2_like(tmp_path / "a")
    llama2_like(tmp_path / "b")
    gguf_of(tmp_path / "m.gguf", tmp_path / "a", "gpt2", "smollm")
    code = (
        "import sys\n"
        "from fastjax.models.checkpoint.load import load_model\n"
        "from fastjax.models.checkpoint.tokenizer import load_tokenizer, save_tokenizer\n"
        "from fastjax.models.checkpoint.save import save_model\n"
        "model = load_model(sys.argv[1])\n"
        "for source in sys.argv[2:]: tokenizer = load_tokenizer(source)\n"
        "save_model(model, 'out', tokenizer=tokenizer)\n"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    sources = [str(hf_folder), *(str(tmp_path / name) for name in ("a", "b", "m.gguf"))]
    out = subprocess.run(
        [sys.executable, "-c", code, *sources], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert out.stdout == "False\n", out.stderr
