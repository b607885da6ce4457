"""Row forms: recognised by their keys, brought to one plain form, or refused with the place and the reason."""

import pytest

from fastjax.errors import UserError
from fastjax.train.data.rows import AlpacaRow, ChatRow, PairRow, TextRow, alpaca_as_pair, normalise, recognise


def normal(row, form=None):
    return normalise(row, "f:7", form or recognise(row, "f:7"))


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "v"},
    {"role": "assistant", "content": "b"},
]
TRAINED = [False, False, True, False, True]


def test_messages_and_sharegpt_are_the_same_chat():
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    expected = ChatRow(CHAT, TRAINED)
    assert normal({"messages": CHAT, "id": 3}) == expected
    assert normal({"conversations": sharegpt}) == expected
    assert normal({"conversations": CHAT}) == expected
    assert normal({"conversations": sharegpt[1:], "system": "s"}) == expected


def test_sharegpt_that_starts_with_gpt_keeps_that_turn():
    turns = [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "?"}]
    row = normal({"conversations": turns})
    assert [m["role"] for m in row.messages] == ["assistant", "user", "assistant"]
    assert row.trained == [True, False, True]


def test_prompt_and_completion_as_strings_or_message_lists():
    assert normal({"prompt": "p", "completion": ""}) == PairRow("p", "")
    row = normal({"prompt": CHAT[:4], "completion": CHAT[4:]})
    # What stands in the prompt is context, an earlier answer too.
    assert row == ChatRow(CHAT, [False, False, False, False, True])


def test_alpaca_and_text():
    assert normal({"instruction": "i", "input": "x", "output": "o"}) == AlpacaRow("i", "x", "o")
    assert normal({"instruction": "i", "output": "o"}) == AlpacaRow("i", "", "o")
    assert normal({"instruction": "i", "input": None, "output": "o"}) == AlpacaRow("i", "", "o")
    assert normal({"text": "t"}) == TextRow("t")
    with_input, without = (alpaca_as_pair(AlpacaRow("i", given, "o")) for given in ("x", ""))
    assert with_input.prompt.endswith("### Instruction:\ni\n\n### Input:\nx\n\n### Response:\n")
    assert without.prompt.endswith("### Instruction:\ni\n\n### Response:\n")
    assert with_input.completion == "o"


def test_null_columns_count_as_absent():
    row = {"messages": None, "text": "t", "prompt": None, "completion": None}
    assert recognise(row, "f:1") == "text"


def test_data_format_overrides_what_is_recognised():
    both = {"messages": CHAT, "text": "t"}
    assert recognise(both, "f:1") == "messages"
    assert normal(both, "text") == TextRow("t")
    with pytest.raises(UserError, match=r"f:7: a row of form alpaca needs instruction and output; instruction, output"):
        normal(both, "alpaca")


def test_tools_and_tool_calls_are_kept_and_arrow_nulls_removed():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}, "id": None}
    messages = [
        {"role": "user", "content": "u", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_calls": None, "name": "f"},
        {"role": "assistant", "content": "three", "tool_calls": None},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}, "z": None}}}
    row = normal({"messages": messages, "tools": [tool]})
    assert row.tools == [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}]
    kept = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert row.messages == [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [kept]},
        {"role": "tool", "content": "3", "name": "f"},
        {"role": "assistant", "content": "three"},
    ]
    assert row.trained == [False, True, False, True]
    for none in (None, [], "", "[]"):
        assert normal({"messages": CHAT, "tools": none}).tools is None


def test_lists_kept_as_json_text_are_read():
    assert normal({"messages": '[{"role": "user", "content": "u"}]', "tools": '[{"name": "f"}]'}) == ChatRow(
        [{"role": "user", "content": "u"}], [False], [{"name": "f"}]
    )


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normal({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "ab"


def test_message_flags_keep_an_answer_as_context():
    answers = [{"train": False}, {"weight": 0}, {"train": True, "weight": 1}, {"train": None}]
    row = normal({"messages": [{"role": "assistant", "content": "a", **flags} for flags in answers]})
    assert row.trained == [False, False, True, True]
    assert all(set(message) == {"role", "content"} for message in row.messages)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "q", "answer": "a"}, r"f:7: no known row form; keys seen: answer, question; forms known: inpu"),
        ({}, "f:7: no known row form; keys seen: none"),
        ({"text": None}, r"keys seen: none \(null: text\)"),
        ({"prompt": "p"}, "no known row form; keys seen: prompt"),
        ([1], "f:7: a row is a list"),
        ("text", "f:7: a row is a string"),
        ({"messages": []}, "f:7: messages is an empty list"),
        ({"messages": {"role": "user"}}, "messages is an object; it must be a list"),
        ({"messages": "hello"}, "messages is a string that is not JSON"),
        ({"messages": ["hi"]}, r"f:7: messages\[0\] is a string; a message is an object"),
        ({"messages": [{"content": "hi"}]}, "keys seen: content; a message has role and content"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "role 'wizard' is not known; roles known: system"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "role .* is not known"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, r"conversations\[0\]: role 'function_call'"),
        ({"messages": [{"role": "user", "content": None}]}, "f:7: .*the user message has null or no content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "the assistant message has null or no content"),
        ({"messages": [{"role": "user"}]}, "null or no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a number; it must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text is trained"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "weight is 0.5; it is 0 or 1"),
        ({"messages": [{"role": "assistant", "content": "a", "train": "no"}]}, "train is 'no'; it is true or false"),
        ({"messages": CHAT, "tools": ["f"]}, "tools is a list; it must be a list of JSON schemas"),
        ({"messages": CHAT, "tools": "f"}, "tools is a string that is not JSON"),
        ({"prompt": "p", "completion": 3}, "prompt is a string and completion is a number"),
        ({"prompt": CHAT[:2], "completion": "a"}, "prompt is a list and completion is a string"),
        ({"instruction": ["i"], "output": "o"}, "f:7: instruction is a list; it must be a string"),
        ({"instruction": "i", "input": 3, "output": "o"}, "input is a number"),
        ({"text": 3}, "f:7: text is a number"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_by_place_and_reason(row, words):
    with pytest.raises(UserError, match=words):
        normal(row)


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a\ud83d"},
        {"prompt": "a", "completion": "\udc00"},
        {"instruction": "a", "input": "\ud83d", "output": "b"},
        {"messages": [{"role": "user", "content": "\ud83d\ude00"}]},
        {"messages": [{"role": "user", "content": "a", "name": "\ud83d"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": {"\ud83d": 1}}]},
        {"conversations": [{"from": "human", "value": "\ud83d"}]},
    ],
)
def test_half_a_surrogate_pair_is_a_bad_row_that_names_its_place(row):
    with pytest.raises(UserError, match=r"^f:3: .*half of a surrogate pair"):
        normalise(row, "f:3", recognise(row, "f:3"))


def test_a_row_that_is_nested_beyond_all_sense_is_a_bad_row():
    deep = value = {}
    for _ in range(5000):
        value["a"] = value = {}
    row = {"messages": [{"role": "user", "content": "a", "tool_calls": [deep]}]}
    with pytest.raises(UserError, match="f:3: nested too deeply"):
        normalise(row, "f:3", "messages")
    with pytest.raises(UserError, match="f:3: nested too deeply"):
        normalise({"messages": "[" * 200_000}, "f:3", "messages")
