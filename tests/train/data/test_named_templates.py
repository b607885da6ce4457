"""The bundled templates write the published prompt formats; a template from a file or a name is used everywhere."""

import pytest

from fastjax.errors import UserError
from fastjax.train.data import NAMED_TEMPLATES, load_dataset, prompt_ids, use_template
from fastjax.train.data import template as templates_module
from fastjax.train.data.time_limit import TimeIsUp, TimeLimit

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "six?"},
    {"role": "assistant", "content": "é 😀"},
]
# Written by hand from each family's published format, with <s> and </s> as BOS and EOS.
EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n"
        "<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nsix?<|im_end|>\n<|im_start|>assistant\né 😀<|im_end|>\n",
        "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n",
        ["four<|im_end|>", "é 😀<|im_end|>"],
    ),
    "llama-3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\ntwo?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nfour<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nsix?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\né 😀<|eot_id|>",
        "<s><|start_header_id|>user<|end_header_id|>\n\ntwo?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ["four<|eot_id|>", "é 😀<|eot_id|>"],
    ),
    "llama-2": (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\ntwo? [/INST] four </s><s>[INST] six? [/INST] é 😀 </s>",
        "<s>[INST] two? [/INST]",
        [" four </s>", " é 😀 </s>"],
    ),
    "mistral": (
        "<s>[INST] Be kind.\n\ntwo?[/INST] four</s>[INST] six?[/INST] é 😀</s>",
        "<s>[INST] two?[/INST]",
        [" four</s>", " é 😀</s>"],
    ),
    "zephyr": (
        "<|system|>\nBe kind.</s>\n<|user|>\ntwo?</s>\n<|assistant|>\nfour</s>\n"
        "<|user|>\nsix?</s>\n<|assistant|>\né 😀</s>\n",
        "<|user|>\ntwo?</s>\n<|assistant|>\n",
        ["four</s>", "é 😀</s>"],
    ),
    "vicuna": (
        "<s>Be kind. USER: two? ASSISTANT: four</s>USER: six? ASSISTANT: é 😀</s>",
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: two? ASSISTANT:",
        [" four</s>", " é 😀</s>"],
    ),
    "alpaca": (
        "<s>Be kind.\n\n### Instruction:\ntwo?\n\n### Response:\nfour</s>\n\n"
        "### Instruction:\nsix?\n\n### Response:\né 😀</s>",
        "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\ntwo?\n\n### Response:\n",
        ["four</s>", "é 😀</s>"],
    ),
}


@pytest.fixture(scope="module")
def make_tokenizer():
    """A byte-level tokenizer with every marker as a token, or with BOS and EOS alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(markers=True, **specials):
        backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        extra = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        backend.add_special_tokens(["<s>", "</s>", *(extra if markers else [])])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, **(specials or {"bos_token": "<s>", "eos_token": "</s>"})
        )

    return make


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_chat_its_prompt_and_its_targets_are_as_published(name, make_tokenizer, targets):
    tokenizer = make_tokenizer()
    assert use_template(tokenizer, name) is None
    text, prompt, answers = EXPECTED[name]
    dataset = load_dataset([{"messages": CHAT}], tokenizer, max_seq_length=512)
    assert tokenizer.decode(dataset[0].input_ids) == text
    assert tokenizer.decode(prompt_ids(tokenizer, "two?", chat=True)) == prompt
    assert targets(dataset, tokenizer) == answers
    assert dataset[0].input_ids.tolist().count(tokenizer.bos_token_id) == text.count("<s>")


@pytest.mark.parametrize("name", ["mistral", "llama-2", "alpaca", "vicuna"])
def test_roles_out_of_order_are_refused_by_templates_of_two_roles(name, make_tokenizer):
    tokenizer = make_tokenizer()
    use_template(tokenizer, name)
    with pytest.raises(UserError, match="row 1: .*roles must alternate.*; its roles are: user user"):
        load_dataset([{"messages": [CHAT[1], CHAT[3]]}], tokenizer, max_seq_length=64)


def test_a_template_can_be_a_file_and_llama3_is_a_spelling_of_llama_3(make_tokenizer, write):
    tokenizer = make_tokenizer()
    use_template(tokenizer, str(write("t.jinja", "{% for m in messages %}{{ m['content'] }}|{% endfor %}")))
    assert tokenizer.decode(prompt_ids(tokenizer, "hi", chat=True)) == "hi|"
    use_template(tokenizer, "llama3")
    assert tokenizer.chat_template == NAMED_TEMPLATES["llama-3"]


def test_templates_that_cannot_be_used_are_refused_by_name(make_tokenizer, write):
    tokenizer = make_tokenizer()
    with pytest.raises(UserError, match="chat_template='chatlm': no such file; give a file with a Jinja template, or "):
        use_template(tokenizer, "chatlm")
    broken = write("t.jinja", "{% for m in messages %}\n{% endif %}")
    with pytest.raises(UserError, match=r"t\.jinja' is no Jinja template in line 2"):
        use_template(tokenizer, str(broken))
    with pytest.raises(UserError, match="closes answers with the EOS token, and the tokenizer has none"):
        use_template(make_tokenizer(bos_token="<s>"), "zephyr")
    assert make_tokenizer(bos_token="<s>").chat_template is None


def test_markers_that_are_no_tokens_are_told(make_tokenizer):
    tokenizer = make_tokenizer(markers=False)
    assert "writes <|im_start|>, <|im_end|>, which this tokenizer has not as tokens" in use_template(
        tokenizer, "chatml"
    )
    assert use_template(tokenizer, "alpaca") is None


MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %} {{ m['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% else %}U: {{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def test_spans_come_from_the_templates_generation_markers(make_tokenizer, targets):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = MARKED
    dataset = load_dataset([{"messages": CHAT[1:]}], tokenizer, max_seq_length=64)
    assert tokenizer.decode(dataset[0].input_ids) == "U: two?\nA: four</s>U: six?\nA: é 😀</s>"
    assert targets(dataset, tokenizer) == [" four</s>", " é 😀</s>"]
    # A mask that rendering prefixes would not give: without the end of the turn.
    tokenizer.chat_template = MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}")
    assert targets(load_dataset([{"messages": CHAT[1:]}], tokenizer, max_seq_length=64), tokenizer) == [
        " four", " é 😀"
    ]  # fmt: skip


def test_flags_choose_among_marked_answers_and_markers_that_miss_some_count_as_none(make_tokenizer, targets):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = MARKED
    flagged = [dict(message) for message in CHAT[1:]]
    flagged[1]["train"] = False
    assert targets(load_dataset([{"messages": flagged}], tokenizer, max_seq_length=64), tokenizer) == [" é 😀</s>"]
    last_only = MARKED.replace(
        "{% generation %}", "{% if loop.last %}{% generation %}x{% endgeneration %}{% endif %}", 1
    )
    tokenizer.chat_template = last_only.replace("</s>", "").replace("{% endgeneration %}{% else", "{% else")
    assert targets(load_dataset([{"messages": flagged}], tokenizer, max_seq_length=64), tokenizer) == ["x é 😀</s>"]


def test_a_template_that_never_ends_is_stopped(make_tokenizer, monkeypatch):
    monkeypatch.setattr(templates_module, "_RENDERING", TimeLimit(seconds=0.3))
    tokenizer = make_tokenizer()
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" + (
        "{% endfor %}{% endfor %}"
    )
    tokenizer.chat_template = loop
    with pytest.raises(UserError, match=r"row 1: the chat template was not done after 0\.3 s and was stopped"):
        load_dataset([{"messages": CHAT}], tokenizer, max_seq_length=64)


def test_a_time_limit_lets_results_and_errors_through_and_ends_nothing_later():
    import time

    limit = TimeLimit(seconds=0.2)
    assert limit.run(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        limit.run(lambda: 1 // 0)
    with pytest.raises(TimeIsUp):
        limit.run(lambda: [None for _ in iter(int, 1)])
    end = time.monotonic() + 0.6
    while time.monotonic() < end:  # an exception that was still on its way would come up here
        pass
