"""formatting_func and dataset_text_field of TRL: rows of any form as rows of text."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fastjax.errors import UserError


def formatted_rows(rows: Iterable[tuple[Any, str]], function: Callable[[Any], Any]) -> Iterator[dict[str, str]]:
    """{"text"} rows of what the function makes of each row: a text, or a list of texts.

    A function that wants a batch of rows as columns, as some notebooks write it, is known by its first result and gets
    batches of one.

    Raises: UserError if the function fails or returns something else, naming the row.
    """
    name = getattr(function, "__name__", type(function).__name__)
    batched: bool | None = None
    for row, place in rows:
        if batched is None:
            batched = _wants_columns(function, row)
        try:
            made = function({key: [value] for key, value in row.items()} if batched else row)
        except Exception as error:
            raise UserError(f"{place}: formatting_func {name} failed: {type(error).__name__}: {error}") from error
        texts = [made] if isinstance(made, str) else made
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{place}: formatting_func {name} returned {_kind(made)}; it returns a text or a list of them"
            )
        yield from ({"text": text} for text in texts)


def field_as_text(rows: Iterable[tuple[Any, str]], field: str) -> Iterator[Any]:
    """{"text"} rows of one column. Rows without a `text` column pass as they are, since that name is TRL's default.

    Raises: UserError for a row without the column, or with something else than text in it, naming the row.
    """
    for row, place in rows:
        value = row.get(field) if isinstance(row, Mapping) else None
        if value is None and field == "text":
            yield row
            continue
        if not isinstance(value, str):
            keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else "none"
            found = "is missing" if value is None else f"holds {_kind(value)}"
            raise UserError(f"{place}: the column {field!r} of dataset_text_field {found} (columns: {keys})")
        yield {"text": value}


def _wants_columns(function: Callable[[Any], Any], row: Any) -> bool:
    """Whether the function takes {column: values}: then a row alone gives it characters, and many texts or an error."""
    if not isinstance(row, Mapping):
        return False
    alone = _attempt(function, dict(row))
    if isinstance(alone, str) or (isinstance(alone, list) and len(alone) == 1):
        return False
    columns = _attempt(function, {key: [value] for key, value in row.items()})
    return isinstance(columns, list) and len(columns) == 1 and isinstance(columns[0], str)


def _attempt(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception:
        return None


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
