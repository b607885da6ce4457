"""Rows out of files, folders, hub ids and Python lists, each with the place it came from.

A place is what a message shows: `file:line` where the format has lines, else a row number.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fastjax.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")

Row = dict[str, Any]
Placed = tuple[Any, str]
DataSource = str | PathLike[str] | Iterable[Mapping[str, Any]]


def read_rows(source: DataSource) -> Iterator[Placed]:
    """Pairs (row, place) of a data source, in its order.

    Args:
      source: a .jsonl, .ndjson, .json, .csv or .parquet file; a folder or hub id owner/name that `datasets` can load
        (its train split); or rows in memory, any iterable of mappings.
    Raises: UserError for a missing, unreadable or empty source and for broken syntax, naming file and line.
    """
    empty = True
    for placed in _open(source):
        empty = False
        yield placed
    if empty:
        raise UserError(f"{describe_source(source)}: no rows in it; the data needs at least one row")


def describe_source(source: DataSource) -> str:
    """The source's name in messages and reports."""
    return str(source) if isinstance(source, str | PathLike) else "rows in memory"


def _open(source: DataSource) -> Iterator[Placed]:
    if not isinstance(source, str | PathLike):
        return ((row, f"row {number}") for number, row in enumerate(source, start=1))
    path = Path(source)
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return _read_with_datasets(str(path))
    if path.suffix.lower() in FILE_READERS or not HUB_ID.fullmatch(str(source)):
        raise UserError(
            f"{source}: no such data file or folder; give a {', '.join(FILE_READERS)} file, a folder of them, "
            "or a hub id owner/name"
        )
    return _read_with_datasets(str(source))


def _open_file(path: Path) -> Iterator[Placed]:
    reader = FILE_READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(
            f"{path}: the file kind {path.suffix or '(no suffix)'} is not known; use one of {', '.join(FILE_READERS)}"
        )
    return _guarded(reader, path)


def _guarded(reader: Callable[[Path], Iterator[Placed]], path: Path) -> Iterator[Placed]:
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def _read_jsonl(path: Path) -> Iterator[Placed]:
    # Binary lines: only "\n" ends a line, while text mode and splitlines also split at U+2028 inside a string.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            text = _decode(line, place)
            if text.strip():
                yield _parse(text, place), place


def _decode(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: not UTF-8 text ({error.reason} at byte {error.start} of the line); save it as UTF-8"
        ) from None


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place}: broken JSON ({error}); each line of a JSONL file is one complete JSON object"
        ) from None


def _read_json(path: Path) -> Iterator[Placed]:
    text = path.read_text(encoding="utf-8-sig")
    start = _skip_space(text, 0)
    if start == len(text):
        return
    if text[start] == "[":
        yield from _read_json_array(path, text, start)
    elif text[start] == "{":
        # Many .json files are JSON lines; a single object is the shortest of them, also when it spans lines.
        yield from _read_json_objects(path, text, start)
    else:
        raise UserError(f"{path}:1: starts with {text[start]!r}; a JSON data file is a list of objects, or one a line")


def _read_json_array(path: Path, text: str, start: int) -> Iterator[Placed]:
    position, number = _skip_space(text, start + 1), 0
    lines = _LineCounter(text)
    if text[position : position + 1] == "]":
        return
    while True:
        number += 1
        place = f"{path}:{lines.at(position)} (item {number})"
        row, position = _decode_value(text, position, path, lines)
        yield row, place
        position = _skip_space(text, position)
        mark = text[position : position + 1]
        if mark == "]":
            return
        if mark != ",":
            found = repr(mark) if mark else "the end of the file"
            raise UserError(f"{path}:{lines.at(position)}: broken JSON (found {found} where ',' or ']' belongs)")
        position = _skip_space(text, position + 1)


def _read_json_objects(path: Path, text: str, position: int) -> Iterator[Placed]:
    lines = _LineCounter(text)
    while position < len(text):
        place = f"{path}:{lines.at(position)}"
        row, position = _decode_value(text, position, path, lines)
        yield row, place
        position = _skip_space(text, position)


class _LineCounter:
    """Line numbers of ascending positions, each character looked at once."""

    def __init__(self, text: str) -> None:
        self._text, self._position, self._line = text, 0, 1

    def at(self, position: int) -> int:
        self._line += self._text.count("\n", self._position, position)
        self._position = position
        return self._line


_DECODER = json.JSONDecoder()


def _decode_value(text: str, position: int, path: Path, lines: _LineCounter) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{lines.at(error.pos)}: broken JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{path}:{lines.at(position)}: broken JSON (nested too deeply)") from None
    except ValueError as error:  # Python reads no whole number of thousands of digits
        raise UserError(f"{path}:{lines.at(position)}: unreadable JSON ({error})") from None


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _read_csv(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is shorter than a long answer
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        line = 1
        try:
            header = next(reader, None)
            if header is None:
                return
            line = reader.line_num + 1
            for values in reader:
                place = f"{path}:{line}"
                line = reader.line_num + 1
                if not values:
                    continue
                if len(values) != len(header):
                    raise UserError(f"{place}: {len(values)} fields under a header of {len(header)}; quote the commas")
                yield dict(zip(header, values, strict=True)), place
        except csv.Error as error:
            raise UserError(f"{path}:{line}: broken CSV ({error})") from None


def _read_parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path}: row {number}"
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as Parquet after row {number} ({_first_line(error)})") from None


def _read_with_datasets(name: str) -> Iterator[Placed]:
    import datasets

    from fastjax.train.data.hub import offline_if_unreachable

    saved = (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file()
    why = None
    try:
        if saved or Path(name).is_dir():
            loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
        else:
            with offline_if_unreachable() as why:
                loaded = datasets.load_dataset(name)
    except Exception as error:  # noqa: BLE001 - datasets raises its own, the hub's, pyarrow's and builtin errors alike
        if why is not None:
            raise UserError(
                f"{name}: no such data file or folder, nor a data set in the hub's cache, and {why}; "
                "check the path, or fetch the data set where the hub can be reached"
            ) from None
        raise UserError(
            f"{name}: neither a data file nor a data set that `datasets` can load ({type(error).__name__}: "
            f"{_first_line(error)}); give a {', '.join(FILE_READERS)} file, a folder of them, or a hub id owner/name"
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            splits = ", ".join(map(str, loaded))
            raise UserError(f"{name}: has no train split, only {splits}; save the one you want as a file")
        loaded = loaded["train"]
    for number, row in enumerate(loaded, start=1):
        yield row, f"{name}: row {number}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


FILE_READERS: dict[str, Callable[[Path], Iterator[Placed]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
