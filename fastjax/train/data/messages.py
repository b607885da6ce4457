"""Messages of a chat, in the spellings that people have, brought to role and content."""

import json
from collections.abc import Mapping
from typing import Any

from fastjax.errors import UserError

Message = dict[str, Any]

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


def read_messages(value: Any, key: str, place: str) -> tuple[list[Message], list[bool]]:
    value = parse_list(value, key, place)
    if not isinstance(value, list) or not value:
        raise UserError(f"{place}: {key} is {kind(value)}; it must be a list of at least one message")
    pairs = [_message(item, f"{place}: {key}[{index}]") for index, item in enumerate(value)]
    return [message for message, _ in pairs], [trained for _, trained in pairs]


def _message(item: Any, place: str) -> tuple[Message, bool]:
    """One message as {"role", "content", ...}, and whether it is an answer to learn."""
    if not isinstance(item, Mapping):
        raise UserError(f"{place} is {kind(item)}; a message is an object with role and content (or from and value)")
    message = without_nulls(item)
    role = _role(message, place)
    content = message.pop("content", message.pop("value", None))
    if content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise UserError(f"{place}: the {role} message has null or no content; give text (it may be empty)")
        content = ""  # a template would print a null as None
    flagged = message.keys() & {"train", "weight"}
    trained = _is_trained(message, place)
    if role != "assistant" and trained and flagged:
        raise UserError(
            f"{place}: the {role} message is marked to be learned ({', '.join(sorted(flagged))}); answers alone are, "
            "so leave the mark out (train_on=all learns everything)"
        )
    return {"role": role, "content": _content(content, place), **message}, trained and role == "assistant"


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
    raise UserError(f"{place}: content is {kind(content)}; it must be a string")


def _text_part(part: Any, place: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise UserError(f'{place}: content has a part that is not {{"type": "text", "text": ...}}; only text is trained')


def read_tools(row: Mapping[str, Any], place: str) -> list[Any] | None:
    """The row's tools; null and the empty list both mean none."""
    tools = parse_list(row.get("tools"), "tools", place)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{place}: tools is {kind(tools)}; it must be a list of JSON schemas")
    return [without_nulls(tool) for tool in tools]


def parse_list(value: Any, key: str, place: str) -> Any:
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


def kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true/false", int: "a number", float: "a number"}
    if value is None:
        return "null"
    if value == []:
        return "an empty list"
    return names.get(type(value), type(value).__name__)
