"""Chats: the ids are the template's, the targets are the answers with their end-of-turn tokens, and nothing else."""

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.data import load_dataset, prompt_ids

THREE_TURNS = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "The answer is six."},
    {"role": "user", "content": "Left?"},
    {"role": "assistant", "content": "12 apples"},
]


def load(rows, tokenizer, **options):
    return load_dataset(rows, tokenizer, **{"max_seq_length": 512, **options})


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "<|im_end|>"), ("mistral", "</s>"), ("llama3", "<|eot_id|>"), ("zephyr", "</s>")]
)
def test_three_turns_train_exactly_the_three_answers_with_their_ends(name, end, every_tokenizer, targets):
    tokenizer = every_tokenizer[name]
    dataset = load([{"messages": THREE_TURNS}], tokenizer)
    runs = [run.strip() for run in targets(dataset, tokenizer)]
    assert runs == [f"four{end}", f"The answer is six.{end}", f"12 apples{end}"]


@pytest.mark.parametrize("name", ["chatml", "mistral", "llama3", "zephyr"])
@pytest.mark.parametrize("train_on", ["responses", "all"])
def test_ids_are_exactly_those_of_transformers(name, train_on, every_tokenizer):
    tokenizer = every_tokenizer[name]
    ids = tokenizer.apply_chat_template(THREE_TURNS, return_dict=False)
    assert load([{"messages": THREE_TURNS}], tokenizer, train_on=train_on)[0].input_ids.tolist() == ids


@pytest.mark.parametrize("name", ["mistral", "llama3"])
def test_bos_stands_once_in_training_and_in_the_prompt(name, every_tokenizer):
    tokenizer = every_tokenizer[name]
    row = load([chat("What is two?", "four")], tokenizer)[0].input_ids.tolist()
    prompt = prompt_ids(tokenizer, "What is two?", chat=True)
    for ids in (row, prompt):
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
    assert row[: len(prompt)] == prompt
    raw = prompt_ids(tokenizer, "What is two?", chat=False)
    assert raw == tokenizer("What is two?")["input_ids"]
    assert prompt_ids(tokenizer, tokenizer.bos_token + "What is two?", chat=False).count(tokenizer.bos_token_id) == 1


def test_template_without_bos_gets_none_though_plain_text_would(zephyr):
    assert zephyr("a")["input_ids"][0] == zephyr.bos_token_id
    assert zephyr.bos_token_id not in load([chat("a", "b")], zephyr)[0].input_ids
    assert zephyr.bos_token_id not in prompt_ids(zephyr, "a", chat=True)


def test_markers_in_user_text_stay_masked(chatml, mistral, targets):
    row = chat("Say [/INST] x</s> [INST] and [/INST]", "no [INST]")
    assert targets(load([row], mistral), mistral) == ["no [INST]</s>"]
    row = chat("x<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>", "no")
    assert targets(load([row], chatml), chatml) == ["no<|im_end|>"]


def test_markers_in_an_answer_do_not_end_it(chatml, targets):
    row = chat("a", "x<|im_end|>\n<|im_start|>user\nb", "c", "d")
    runs = targets(load([row], chatml), chatml)
    assert runs == ["x<|im_end|>\n<|im_start|>user\nb<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize(
    "answer", ["", " ", "\n", "\n\nfour", "four\n\n", "  four  ", "é😀", "🏳️\u200d🌈", "a\u00a0b", "\t"]
)
@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_every_character_of_odd_answers_is_a_target_and_prompts_are_those_of_inference(
    name, answer, every_tokenizer, targets
):
    tokenizer = every_tokenizer[name]
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}[name]
    expected = answer if name == "chatml" else answer.strip()  # this template trims
    dataset = load([chat("What is it?", answer)], tokenizer)
    assert targets(dataset, tokenizer) == [expected + end]
    prompt = prompt_ids(tokenizer, "What is it?", chat=True)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is it?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert dataset[0].input_ids[: len(prompt)].tolist() == prompt
    assert not dataset[0].loss_mask[: len(prompt)].any()
    assert dataset[0].loss_mask[len(prompt)]


def test_trailing_white_space_of_the_template_is_no_target(chatml):
    row = load([chat("a", "four")], chatml)[0]
    newline = chatml("\n", add_special_tokens=False)["input_ids"]
    assert row.input_ids[-len(newline) :].tolist() == newline
    assert not row.loss_mask[-len(newline) :].any()
    assert row.loss_mask[-len(newline) - 1]


def test_white_space_at_an_answers_end_is_a_target_where_no_token_closes_it(make_chatml, targets):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501
    tokenizer = make_chatml(template)
    assert targets(load([chat("a", "four  ")], tokenizer), tokenizer) == ["four  "]


def test_joins_that_merge_train_every_character_after_the_prompt_of_inference(merging):
    dataset = load([chat("x", "\nxe")], merging)
    prompt = prompt_ids(merging, "x", chat=True)
    assert merging.convert_ids_to_tokens(prompt)[-2:] == [":", "\n"]
    assert dataset[0].input_ids[: len(prompt)].tolist() == prompt
    learned = dataset[0].input_ids[dataset[0].loss_mask].tolist()
    assert merging.convert_ids_to_tokens(learned) == ["\n", "x", "e", "<e>"]
    assert dataset[0].loss_mask.tolist() == [False] * len(prompt) + [True] * len(learned)


def test_prompt_that_reads_differently_before_an_answer_is_tokenised_as_at_inference(llama3_gpt2_words):
    """No token spans the join here, and yet the ids before it are other ones when an answer follows."""
    row = load([chat("a", "four")], llama3_gpt2_words)[0]
    prompt = prompt_ids(llama3_gpt2_words, "a", chat=True)
    whole = llama3_gpt2_words.apply_chat_template(chat("a", "four")["messages"], return_dict=False)
    assert llama3_gpt2_words.decode(prompt[-1]) == "\n\n"
    assert whole[: len(prompt)] != prompt
    assert row.input_ids[: len(prompt)].tolist() == prompt


def test_later_prompts_equal_those_that_generation_makes_from_the_history(merging):
    messages = chat("x", "\nxe", "x", "\n\n.", "e", ".mm")["messages"]
    ids = load([{"messages": messages}], merging)[0].input_ids.tolist()
    for count in (1, 3, 5):
        prompt = prompt_ids(merging, messages[:count], chat=True)
        assert ids[: len(prompt)] == prompt


def test_first_turn_of_the_assistant_is_trained(chatml, make_chatml, targets):
    row = {"conversations": [{"from": f, "value": v} for f, v in (("gpt", "Hi!"), ("human", "a"), ("gpt", "b"))]}
    assert targets(load([row], chatml), chatml) == ["Hi!<|im_end|>", "b<|im_end|>"]
    with_system = make_chatml("chatml_default_system")
    assert targets(load([row], with_system), with_system) == ["Hi!<|im_end|>", "b<|im_end|>"]


def test_answers_that_the_template_rewrites_later_are_found(make_chatml, targets):
    tokenizer = make_chatml("thinking")
    row = chat("a", "<think>hm</think>four", "b", "<think>so</think>six")
    assert targets(load([row], tokenizer), tokenizer) == ["four<|im_end|>", "<think>so</think>six<|im_end|>"]


def test_template_that_hides_an_answer_is_refused_for_responses_only(make_chatml):
    tokenizer = make_chatml(
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"
    )
    with pytest.raises(UserError, match="row 1: the chat template rewrites message 2"):
        load([chat("a", "b")], tokenizer)
    assert len(load([chat("a", "b")], tokenizer, train_on="all")) == 1


def test_sharegpt_and_messages_give_identical_ids(chatml):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    messages = [{"role": "system", "content": "You are kind."}, *THREE_TURNS[:4]]
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    dataset = load([{"messages": messages}, {"conversations": sharegpt}, {"conversations": messages}], chatml)
    for other in (1, 2):
        assert np.array_equal(dataset[0].input_ids, dataset[other].input_ids)
        assert np.array_equal(dataset[0].loss_mask, dataset[other].loss_mask)
    assert dataset.report.forms == {"messages": 1, "conversations": 2}


def test_tools_reach_the_template_and_their_results_are_not_learned(make_chatml, targets):
    tokenizer = make_chatml("tools")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "What is two?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "secret result"},
        {"role": "assistant", "content": "four"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}, "strict": None}}]
    rows = [{"messages": messages, "tools": tools}, {"messages": messages}, {"messages": messages, "tools": None}]
    dataset = load(rows, tokenizer)
    texts = [tokenizer.decode(row.input_ids) for row in dataset]
    assert '"name": "add", "parameters": {}}' in texts[0]
    assert "strict" not in texts[0]
    assert texts[1] == texts[2]
    assert "None" not in texts[1]
    runs = targets(dataset, tokenizer)
    assert runs[1:] == ["four<|im_end|>"]
    assert '"arguments": {"a": 2}' in runs[0]


def test_answers_marked_as_context_are_not_learned(chatml, targets):
    messages = [dict(m) for m in THREE_TURNS]
    messages[3]["train"] = False
    assert targets(load([{"messages": messages}], chatml), chatml) == ["four<|im_end|>", "12 apples<|im_end|>"]
    pair = {"prompt": THREE_TURNS[:5], "completion": THREE_TURNS[5:]}
    assert targets(load([pair], chatml), chatml) == ["12 apples<|im_end|>"]


def test_training_on_all_learns_every_token_but_the_first(chatml):
    row = load([chat("a", "b")], chatml, train_on="all")[0]
    assert not row.loss_mask[0]
    assert row.loss_mask[1:].all()


def test_chats_without_a_template_are_refused(plain):
    with pytest.raises(UserError, match="row 1: a chat, but the tokenizer has no chat template"):
        load([chat("a", "b")], plain)
    with pytest.raises(UserError, match="no chat template"):
        prompt_ids(plain, "a", chat=True)


def test_roles_that_the_template_refuses_are_named(mistral):
    row = {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}
    with pytest.raises(UserError, match=r"row 1: .*roles must alternate.*; its roles are: assistant user"):
        load([row], mistral)


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.getpid() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_run_no_code(template, make_chatml):
    with pytest.raises(UserError, match="unsafe"):
        load([chat("a", "b")], make_chatml(template))


@pytest.mark.parametrize(
    "template", ["{{ undefined.attribute }}", "{% if %}", "{{ 1 + 'a' }}", "{% for i in range(10**12) %}x{% endfor %}"]
)
def test_templates_that_fail_are_an_error_of_the_user(template, make_chatml):
    with pytest.raises(UserError, match="refuses this conversation"):
        load([chat("a", "b")], make_chatml(template))


def test_malformed_prompts_are_refused(chatml):
    with pytest.raises(UserError, match="a raw prompt is a string"):
        prompt_ids(chatml, [{"role": "user", "content": "a"}], chat=False)
    with pytest.raises(UserError, match=r"prompt: messages\[0\]: role 'wizard'"):
        prompt_ids(chatml, [{"role": "wizard", "content": "a"}], chat=True)


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_with_half_a_surrogate_pair_is_refused(chatml, chat):
    with pytest.raises(UserError, match="the prompt.*half of a surrogate pair"):
        prompt_ids(chatml, "a\ud83d", chat=chat)


def test_half_a_surrogate_pair_in_a_template_is_refused(make_chatml):
    with pytest.raises(UserError, match="chat template wrote.*half of a surrogate pair"):
        prompt_ids(make_chatml("{{ '\ud83d' }}"), "a", chat=True)


@pytest.mark.parametrize("tools", [5, True, {"name": "f"}, "5", [5], "x"])
def test_tools_of_a_prompt_that_are_no_list_of_schemas_are_refused(chatml, tools):
    with pytest.raises(UserError, match="tools is .*must be a list"):
        prompt_ids(chatml, "a", chat=True, tools=tools)


@pytest.mark.parametrize("prompt", [5, {"role": "user", "content": "a"}, None, []])
def test_a_chat_prompt_that_is_no_list_of_messages_is_refused(chatml, prompt):
    with pytest.raises(UserError, match="the prompt"):
        prompt_ids(chatml, prompt, chat=True)
