"""Rows out of files, folders, hub ids and Python lists, each with the place it came from.

A place is what a message shows: `file:line` where the format has lines, else a row number. Rows come as payloads: a
row, a line of JSON that is still to be parsed (so that workers can do it), or an Unreadable.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from fastjax.errors import UserError
from fastjax.train.data.folders import files_of_split
from fastjax.train.data.hub import has_dataset_card, is_saved_dataset, read_with_datasets
from fastjax.train.data.json_files import read_json
from fastjax.train.data.sources import HUB_ID, Source, parse_sources

Row = dict[str, Any]
Placed = tuple[Any, str]
DataSource = str | PathLike[str] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Unreadable:
    """A row that its file's syntax spoils; the rows after it can be read."""

    message: str


def read_rows(source: DataSource) -> Iterator[Placed]:
    """Pairs (row, place) of a data source, in its order.

    Args:
      source: what `parse_sources` takes, without weights; or rows in memory, any iterable of mappings.
    Raises: UserError for a missing, unreadable or empty source and for broken syntax, naming file and line.
    """
    if not isinstance(source, str | PathLike):
        payloads = read_memory(source)
    else:
        sources = parse_sources(str(source))
        weighted = next((one for one in sources if one.weight != 1), None)
        if weighted is not None:
            raise UserError(f"{weighted}: a weight belongs to data that is trained on; leave *{weighted.weight:g} out")
        payloads = (placed for one in sources for placed in read_source(one))
    for payload, place in payloads:
        row = parse_payload(payload, place)
        if isinstance(row, Unreadable):
            raise UserError(row.message)
        yield row, place


def read_memory(rows: Iterable[Any]) -> Iterator[Placed]:
    """Payloads of rows in memory. Raises: UserError if there are none."""
    return _not_empty(((row, f"row {number}") for number, row in enumerate(rows, start=1)), "rows in memory")


def read_source(source: Source) -> Iterator[Placed]:
    """Payloads of the source's slice, in order. Raises: as `read_rows`."""
    count = sum(1 for _ in _open(source)) if source.rows.needs_total else None
    return _not_empty(source.rows.of(_open(source), count), str(source))


def parse_payload(payload: Any, place: str) -> Any:
    """The row of a payload; an Unreadable if it is none."""
    if not isinstance(payload, bytes):
        return payload
    try:
        text = payload.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Unreadable(
            f"{place}: not UTF-8 text ({error.reason} at byte {error.start} of the line); save it as UTF-8"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"{place}: broken JSON ({error}); each line of a JSONL file is one complete JSON object")


def source_files(source: Source) -> list[Path] | None:
    """The files that a source is read from by this module; None where `datasets` reads it.

    Raises: UserError for a source that is neither there nor a hub id.
    """
    path = Path(source.name)
    if path.is_file():
        if source.split not in (None, "train"):
            raise UserError(f"{source}: a file has no split {source.split!r}; leave :{source.split} out")
        return [path]
    if path.is_dir():
        return (
            None if is_saved_dataset(path) or has_dataset_card(path) else files_of_split(path, source.split, SUFFIXES)
        )
    if _kind(path) in FILE_READERS or not HUB_ID.fullmatch(source.name):
        raise UserError(
            f"{source.name}: no such data file or folder; give a {', '.join(FILE_READERS)} file (JSON and CSV also "
            "with .gz), a folder of them, or a hub id owner/name"
        )
    return None


def _open(source: Source) -> Iterator[Placed]:
    files = source_files(source)
    if files is None:
        return read_with_datasets(source.name, source.split, source.config, list(FILE_READERS))
    return (placed for path in files for placed in _open_file(path))


def _not_empty(rows: Iterator[Placed], name: str) -> Iterator[Placed]:
    empty = True
    for placed in rows:
        empty = False
        yield placed
    if empty:
        raise UserError(f"{name}: no rows in it; the data needs at least one row")


def _kind(path: Path) -> str:
    """The suffix that tells the format, without .gz."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def _open_file(path: Path) -> Iterator[Placed]:
    reader = FILE_READERS.get(_kind(path))
    if reader is None or (path.suffix.lower() == ".gz" and _kind(path) in (".parquet", ".arrow")):
        raise UserError(
            f"{path}: the file kind {path.suffix or '(no suffix)'} is not known; use one of {', '.join(FILE_READERS)}"
        )
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _binary(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"))
    return path.open("rb")


def _read_jsonl(path: Path) -> Iterator[Placed]:
    # Binary lines: only "\n" ends a line, while text mode and splitlines also split at U+2028 inside a string.
    with _binary(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and line.strip() != b"\xef\xbb\xbf":
                yield line, f"{path}:{number}"


def _read_json_file(path: Path) -> Iterator[Placed]:
    with io.TextIOWrapper(_binary(path), encoding="utf-8-sig") as file:
        yield from read_json(path, file)


def _read_csv(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is shorter than a long answer
    with io.TextIOWrapper(_binary(path), encoding="utf-8-sig", newline="") as file:
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
                    fields = f"{len(values)} fields under a header of {len(header)}"
                    yield Unreadable(f"{place}: {fields}; quote the commas"), place
                    continue
                yield dict(zip(header, values, strict=True)), place
        except csv.Error as error:
            raise UserError(f"{path}:{line}: broken CSV ({error})") from None


def _read_parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path}: row {number}"
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as Parquet after row {number} ({_first_line(error)})") from None


def _read_arrow(path: Path) -> Iterator[Placed]:
    """Both forms of Arrow's files: the stream that `datasets` writes, and the one with a footer (Feather 2)."""
    import pyarrow
    import pyarrow.ipc

    number = 0
    try:
        with pyarrow.memory_map(str(path)) as file:
            has_footer = file.read(6) == b"ARROW1"
            file.seek(0)
            opened = pyarrow.ipc.open_file(file) if has_footer else pyarrow.ipc.open_stream(file)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches)) if has_footer else opened
            for batch in batches:
                for start in range(0, batch.num_rows, 1024):
                    for row in batch.slice(start, 1024).to_pylist():
                        number += 1
                        yield row, f"{path}: row {number}"
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as Arrow after row {number} ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


FILE_READERS: dict[str, Callable[[Path], Iterator[Placed]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json_file,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
SUFFIXES = (*FILE_READERS, *(f"{kind}.gz" for kind in (".jsonl", ".ndjson", ".json", ".csv")))
