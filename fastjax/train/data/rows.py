"""The row forms that people have, recognised by their keys and brought to one of five plain ones.

    input_ids       {"input_ids", "labels"}                                already tokenised; labels may be missing
    messages        {"messages": [{"role", "content"}, ...], "tools": [...]}
    conversations   {"conversations": [{"from", "value"}, ...]}            ShareGPT; role/content inside works too
    prompt          {"prompt", "completion"}                               two strings, or two message lists
    alpaca          {"instruction", "input", "output"}                     input may be missing or empty
    text            {"text"}

Other keys of a row are left alone. A key whose value is null counts as absent, since Arrow fills every column of a
mixed data set that way; for the same reason null entries inside messages and tools are removed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastjax.errors import UserError
from fastjax.train.data.messages import Message, kind, parse_list, read_messages, read_tools


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


@dataclass(frozen=True)
class IdsRow:
    """Token ids as they are to be trained. input_ids: [T] int32. loss_mask: [T] bool, the targets."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


NormalRow = ChatRow | PairRow | AlpacaRow | TextRow | IdsRow

FORMS: dict[str, tuple[str, ...]] = {
    "input_ids": ("input_ids",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}


def recognise(row: Any, place: str) -> str:
    """The name of the row's form, by its keys; the first of FORMS wins where several fit. Raises: UserError."""
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: a row is {kind(row)}; every row is an object with named fields")
    present = {key for key, value in row.items() if value is not None}
    for form, keys in FORMS.items():
        if present.issuperset(keys):
            return form
    nulls = sorted(str(key) for key in row if row[key] is None)
    seen = ", ".join(sorted(map(str, present))) or "none"
    raise UserError(
        f"{place}: no known row form; keys seen: {seen}" + (f" (null: {', '.join(nulls)})" if nulls else "") + "; "
        f"forms known: {describe_forms()}; --data_columns prompt=NAME,completion=NAME takes other columns for them"
    )


def describe_forms() -> str:
    return " | ".join("+".join(keys) for keys in FORMS.values())


def parse_columns(text: str | None) -> dict[str, str]:
    """{key of a row form: column that holds it} of "prompt=question,completion=answer". Raises: UserError."""
    if text is None:
        return {}
    pairs = [part.partition("=") for part in text.split(",")]
    columns = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    keys = {key for form in FORMS.values() for key in form} | {"input", "system", "tools", "labels"}
    for ours, equals, theirs in pairs:
        if not equals or not theirs.strip():
            raise UserError(f"data_columns={text!r} is not understood at {ours!r}; write KEY=COLUMN,KEY=COLUMN")
        if ours.strip() not in keys:
            raise UserError(
                f"data_columns={text!r}: {ours.strip()!r} is no key of a row form: {', '.join(sorted(keys))}"
            )
    if len(columns) < len(pairs):
        raise UserError(f"data_columns={text!r} names a key twice; leave one of them out")
    return columns


def rename_columns(row: Any, columns: Mapping[str, str], place: str) -> Any:
    """The row with its columns under the keys of a row form, and nothing else.

    Raises: UserError for a row that has none of the columns.
    """
    if not columns or not isinstance(row, Mapping):
        return row
    renamed = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    if not renamed:
        seen = ", ".join(map(str, row)) or "none"
        raise UserError(f"{place}: none of data_columns' {', '.join(columns.values())} is there; keys seen: {seen}")
    return renamed


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
        raise UserError(f"{place}: a row is {kind(row)}; every row is an object with named fields")
    missing = [key for key in FORMS[form] if row.get(key) is None]
    if missing:
        raise UserError(
            f"{place}: a row of form {form} needs {' and '.join(FORMS[form])}; {', '.join(missing)} missing or null, "
            f"keys seen: {', '.join(map(str, row)) or 'none'}"
        )
    if form == "input_ids":
        return _ids(row, place)
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
    messages, trained = read_messages(row[form], form, place)
    system = row.get("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _string(row, "system", place)})
        trained.insert(0, False)
    return ChatRow(messages, trained, read_tools(row, place))


def _chat_pair(row: Mapping[str, Any], place: str) -> ChatRow:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError(
            f"{place}: prompt is {kind(prompt)} and completion is {kind(completion)}; "
            "both are strings, or both are message lists"
        )
    asked, _ = read_messages(prompt, "prompt", place)
    answered, trained = read_messages(completion, "completion", place)
    return ChatRow(asked + answered, [False] * len(asked) + trained, read_tools(row, place))


def _string(row: Mapping[str, Any], key: str, place: str) -> str:
    if not isinstance(row[key], str):
        raise UserError(f"{place}: {key} is {kind(row[key])}; it must be a string")
    return row[key]


# Other names under which prepared data sets mark the targets, beside labels: 1 is a target.
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
_NO_TARGET = -100


def _ids(row: Mapping[str, Any], place: str) -> IdsRow:
    """Ids as they stand; what attention_mask marks as padding at either end is taken off.

    labels[i] is for input_ids[i], as in transformers: equal to it where it is a target, else -100.
    """
    ids = _whole_numbers(row, "input_ids", place)
    if len(ids) and not 0 <= ids.min() <= ids.max() < 2**31:
        raise UserError(f"{place}: input_ids has {ids.min()} to {ids.max()}; token ids are from 0 to 2**31 - 1")
    given = [name for name in ("labels", *_MASKS) if row.get(name) is not None]
    if len(given) > 1:
        raise UserError(f"{place}: {' and '.join(given)} both say what is learned; leave one of them out")
    mask = np.ones(len(ids), bool)
    if given:
        values = _whole_numbers(row, given[0], place)
        if len(values) != len(ids):
            raise UserError(f"{place}: {given[0]} has {len(values)} entries and input_ids {len(ids)}; one for each")
        mask = values != _NO_TARGET if given[0] == "labels" else values != 0
        if given[0] == "labels" and (wrong := np.flatnonzero(mask & (values != ids))).size:
            at = int(wrong[0])
            raise UserError(
                f"{place}: labels[{at}] is {values[at]} and input_ids[{at}] is {ids[at]}; a label is its own token's "
                f"id, or {_NO_TARGET} (the shift by one happens in training)"
            )
    if row.get("attention_mask") is not None:
        real = np.flatnonzero(_whole_numbers(row, "attention_mask", place))
        if len(row["attention_mask"]) != len(ids) or (real.size and real[-1] - real[0] + 1 != real.size):
            raise UserError(f"{place}: attention_mask must have one entry a token, and 0 at the ends only")
        ids, mask = (array[real[0] : real[-1] + 1] if real.size else array[:0] for array in (ids, mask))
    return IdsRow(ids.astype(np.int32), mask)


def _whole_numbers(row: Mapping[str, Any], key: str, place: str) -> np.ndarray:
    value = parse_list(row[key], key, place)
    try:
        array = np.asarray([] if value is None else value)
    except ValueError:
        array = np.asarray(None)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise UserError(f"{place}: {key} is {kind(row[key])}; it must be a list of whole numbers")
    return array.astype(np.int64)
