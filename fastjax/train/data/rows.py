"""The row forms that people have, recognised by their keys and brought to one of four plain ones.

    messages        {"messages": [{"role", "content"}, ...], "tools": [...]}
    conversations   {"conversations": [{"from", "value"}, ...]}            ShareGPT; role/content inside works too
    prompt          {"prompt", "completion"}                               two strings, or two message lists
    alpaca          {"instruction", "input", "output"}                     input may be missing or empty
    text            {"text"}

Other keys of a row are left alone. A key whose value is null counts as absent, since Arrow fills every column of a
mixed data set that way; for the same reason null entries inside messages and tools are removed.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastjax.errors import UserError

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatRow:
    """A conversation; `trained[i]` says whether message i is an answer to learn."""

    messages: list[Message]
    trained: list[bool]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class PairRow:
    """Plain text to continue, and its continuation, joined as they stand."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class AlpacaRow:
    """An instruction with an optional input, and the answer."""

    instruction: str
    input: str
    output: str


@dataclass(frozen=True)
class TextRow:
    """A document, learned whole."""

    text: str


NormalRow = ChatRow | PairRow | AlpacaRow | TextRow

FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}

ROLES = ("system", "developer", "user", "assistant", "tool")

# The names that ShareGPT data uses in `from`. function_call is not among them: it is an assistant's call written as
# text, and only the person knows in which form the template wants it.
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def recognise(row: Any, place: str) -> str:
    """The name of the row's form, by its keys; the first of FORMS wins where several fit. Raises: UserError."""
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: a row is {_kind(row)}; every row is an object with named fields")
    present = {key for key, value in row.items() if value is not None}
    for form, keys in FORMS.items():
        if present.issuperset(keys):
            return form
    nulls = sorted(str(key) for key in row if row[key] is None)
    seen = ", ".join(sorted(map(str, present))) or "none"
    raise UserError(
        f"{place}: no known row form; keys seen: {seen}" + (f" (null: {', '.join(nulls)})" if nulls else "") + "; "
        f"forms known: {describe_forms()}"
    )


def describe_forms() -> str:
    return " | ".join("+".join(keys) for keys in FORMS.values())


def check_data_format(data_format: str | None) -> None:
    """Raises: UserError unless it is None or the name of a form."""
    if data_format is not None and data_format not in FORMS:
        raise UserError(f"data_format={data_format!r} is not one of {', '.join(FORMS)}")


def normalise(row: Any, place: str, form: str) -> NormalRow:
    """The row in its plain form.

    Args:
      row: a mapping with the keys of `form`.
      place: file and line, for messages.
      form: a name in FORMS.
    Raises: UserError for missing keys, unknown roles, wrong types, null content, and text that no tokenizer can read
      (a lone half of a surrogate pair), naming `place`.
    """
    try:
        normal = _normalise(row, place, form)
        _check_text(vars(normal).values(), place)
    except RecursionError:
        raise UserError(f"{place}: nested too deeply; a row has a few levels") from None
    return normal


def check_characters(text: str, place: str) -> None:
    """Raises: UserError if the text holds a lone half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{place}: {half} at character {error.start} is half of a surrogate pair and no character; "
            "remove it, or write the character whole"
        ) from None


def _check_text(values: Iterable[Any], place: str) -> None:
    for value in values:
        if isinstance(value, str):
            check_characters(value, place)
        elif isinstance(value, Mapping):
            _check_text(value, place)
            _check_text(value.values(), place)
        elif isinstance(value, list | tuple):
            _check_text(value, place)


def _normalise(row: Any, place: str, form: str) -> NormalRow:
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: a row is {_kind(row)}; every row is an object with named fields")
    missing = [key for key in FORMS[form] if row.get(key) is None]
    if missing:
        raise UserError(
            f"{place}: a row of form {form} needs {' and '.join(FORMS[form])}; {', '.join(missing)} missing or null, "
            f"keys seen: {', '.join(map(str, row)) or 'none'}"
        )
    if form in ("messages", "conversations"):
        return _chat(row, form, place)
    if form == "prompt" and not (isinstance(row["prompt"], str) and isinstance(row["completion"], str)):
        return _chat_pair(row, place)
    if form == "prompt":
        return PairRow(row["prompt"], row["completion"])
    if form == "alpaca":
        given = "" if row.get("input") is None else _string(row, "input", place)
        return AlpacaRow(_string(row, "instruction", place), given, _string(row, "output", place))
    return TextRow(_string(row, "text", place))


def alpaca_as_chat(row: AlpacaRow) -> ChatRow:
    """Instruction and input as one user message, the output as the answer."""
    content = f"{row.instruction}\n\n{row.input}" if row.input else row.instruction
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": row.output}]
    return ChatRow(messages, [False, True])


def alpaca_as_pair(row: AlpacaRow) -> PairRow:
    """The prompt format of the Alpaca data set, for tokenizers without a chat template."""
    context, given = "", ""
    if row.input:
        context, given = ", paired with an input that provides further context", f"### Input:\n{row.input}\n\n"
    prompt = (
        f"Below is an instruction that describes a task{context}. Write a response that appropriately completes the "
        f"request.\n\n### Instruction:\n{row.instruction}\n\n{given}### Response:\n"
    )
    return PairRow(prompt, row.output)


def _chat(row: Mapping[str, Any], form: str, place: str) -> ChatRow:
    messages, trained = _messages(row[form], form, place)
    system = row.get("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _string(row, "system", place)})
        trained.insert(0, False)
    return ChatRow(messages, trained, _tools(row, place))


def _chat_pair(row: Mapping[str, Any], place: str) -> ChatRow:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError(
            f"{place}: prompt is {_kind(prompt)} and completion is {_kind(completion)}; "
            "both are strings, or both are message lists"
        )
    asked, _ = _messages(prompt, "prompt", place)
    answered, trained = _messages(completion, "completion", place)
    return ChatRow(asked + answered, [False] * len(asked) + trained, _tools(row, place))


def _messages(value: Any, key: str, place: str) -> tuple[list[Message], list[bool]]:
    value = _parsed(value, key, place)
    if not isinstance(value, list) or not value:
        raise UserError(f"{place}: {key} is {_kind(value)}; it must be a list of at least one message")
    pairs = [_message(item, f"{place}: {key}[{index}]") for index, item in enumerate(value)]
    return [message for message, _ in pairs], [trained for _, trained in pairs]


def _message(item: Any, place: str) -> tuple[Message, bool]:
    """One message as {"role", "content", ...}, and whether it is an answer to learn."""
    if not isinstance(item, Mapping):
        raise UserError(f"{place} is {_kind(item)}; a message is an object with role and content (or from and value)")
    message = without_nulls(item)
    role = _role(message, place)
    content = message.pop("content", message.pop("value", None))
    if content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise UserError(f"{place}: the {role} message has null or no content; give text (it may be empty)")
        content = ""  # a template would print a null as None
    trained = role == "assistant" and _is_trained(message, place)
    return {"role": role, "content": _content(content, place), **message}, trained


def _role(message: Message, place: str) -> str:
    """Take role (or from) out of the message and give it its usual name."""
    if "role" in message:
        name, names = message.pop("role"), dict(zip(ROLES, ROLES, strict=True))
    elif "from" in message:
        name, names = message.pop("from"), SHAREGPT_ROLES
    else:
        raise UserError(
            f"{place}: keys seen: {', '.join(map(str, message)) or 'none'}; a message has role and content, "
            "or from and value"
        )
    if not isinstance(name, str) or name not in names:
        raise UserError(f"{place}: role {name!r} is not known; roles known: {', '.join(names)}")
    return names[name]


def _is_trained(message: Message, place: str) -> bool:
    """Take the per-message flags out: train false, or weight 0, keeps an answer as context only."""
    train, weight = message.pop("train", True), message.pop("weight", 1)
    if not isinstance(train, bool):
        raise UserError(f"{place}: train is {train!r}; it is true or false")
    if weight not in (0, 1):
        raise UserError(f"{place}: weight is {weight!r}; it is 0 or 1")
    return train and bool(weight)


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_text_part(part, place) for part in content)
    raise UserError(f"{place}: content is {_kind(content)}; it must be a string")


def _text_part(part: Any, place: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise UserError(f'{place}: content has a part that is not {{"type": "text", "text": ...}}; only text is trained')


def _tools(row: Mapping[str, Any], place: str) -> list[Any] | None:
    """The row's tools; null and the empty list both mean none."""
    tools = _parsed(row.get("tools"), "tools", place)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{place}: tools is {_kind(tools)}; it must be a list of JSON schemas")
    return [without_nulls(tool) for tool in tools]


def _parsed(value: Any, key: str, place: str) -> Any:
    """CSV and many hub sets keep lists as JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError as error:  # RecursionError is normalise's
        raise UserError(f"{place}: {key} is a string that is not JSON ({error}); it must be a list") from None


def without_nulls(value: Any) -> Any:
    """A copy without the null entries of its mappings, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def _string(row: Mapping[str, Any], key: str, place: str) -> str:
    if not isinstance(row[key], str):
        raise UserError(f"{place}: {key} is {_kind(row[key])}; it must be a string")
    return row[key]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true/false", int: "a number", float: "a number"}
    if value is None:
        return "null"
    if value == []:
        return "an empty list"
    return names.get(type(value), type(value).__name__)
