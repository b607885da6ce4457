"""From data sources to tokenised documents: the one place where every row is read, counted and checked."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.train.data.cache import cache_key, cached
from fastjax.train.data.chunk import NAMED_ROWS, RowOptions
from fastjax.train.data.dataset import Dataset, TokenisedDataset
from fastjax.train.data.mixture import combine
from fastjax.train.data.readers import DataSource, Placed, read_memory, read_source
from fastjax.train.data.report import BAD, DataReport
from fastjax.train.data.rows import check_data_format
from fastjax.train.data.sources import Source, parse_sources
from fastjax.train.data.store import TokenWriter
from fastjax.train.data.tokenise import TRAIN_ON, encoder_of
from fastjax.train.data.workers import make_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_ROWS = ("truncate", "drop", "split", "error")
# What is handed to the tokenizer's threads, or to a process, in one call.
ROWS_AT_ONCE = 1000
CHARACTERS_AT_ONCE = 4_000_000
_NEWS_EVERY_S = 10.0


def load_dataset(
    source: DataSource,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_seq_length: int,
    train_on: str = "responses",
    long_rows: str = "truncate",
    vocab_size: int | None = None,
    data_format: str | None = None,
    columns: dict[str, str] | None = None,
    text_parts: tuple[str, str] | None = None,
    skip_bad_rows: bool = False,
    seed: int = 0,
    cache: Path | None = None,
    num_proc: int | None = 1,
) -> Dataset:
    """The source's rows, tokenised, with their targets marked and every row accounted for in `.report`.

    Args:
      source: what `parse_sources` takes, or rows in memory.
      tokenizer: a fast tokenizer; its chat template is used for chats, and for Alpaca rows if it has one.
      max_seq_length: tokens a row may have.
      train_on: "responses" masks everything but the answers, "all" masks nothing. Text rows are learned whole, unless
        `text_parts` tells where their answers are.
      long_rows: what happens to a longer row: "truncate" cuts its end off, "drop" leaves it out, "split" makes several
        documents of it (see `split_row`), "error" stops.
      vocab_size: the model's; ids at or above it are refused. None does not check.
      data_format: a name in FORMS for all rows; None recognises each row by its keys.
      columns: {key of a row form: column that holds it}, see `rename_columns`.
      text_parts: what stands before a user's turn and before an answer in text rows, for train_on="responses".
      skip_bad_rows: leave rows out that cannot be used, and count them, instead of stopping.
      seed: of the rows that a fractional weight takes.
      cache: folder for tokenised data; None keeps them in temporary files.
      num_proc: processes that tokenise; None takes one a core where the data are many.
    Raises: UserError for bad options, unreadable sources, bad rows (the first three named, with their number), ids
      beyond the vocabulary, and for data in which no row is usable.
    """
    options = RowOptions(max_seq_length, train_on, long_rows, vocab_size, data_format, columns or {}, text_parts)
    _check(options)
    encoder_of(tokenizer, len(tokenizer))  # a tokenizer that cannot be used is refused before anything is read
    loader = _Loader(tokenizer, options, skip_bad_rows, cache, num_proc)
    if not isinstance(source, str | PathLike):
        return loader.tokenise(read_memory(source), "rows in memory", None)
    sources = parse_sources(str(source))
    return combine([loader.load(one) for one in sources], [one.weight for one in sources], seed)


def _check(options: RowOptions) -> None:
    if options.max_seq_length < 2:
        raise UserError(
            f"max_seq_length={options.max_seq_length}; set it to at least 2, a token is learned from the one before"
        )
    if options.train_on not in TRAIN_ON:
        raise UserError(f"train_on={options.train_on!r} is not one of {', '.join(TRAIN_ON)}")
    if options.long_rows not in LONG_ROWS:
        raise UserError(f"long_rows={options.long_rows!r} is not one of {', '.join(LONG_ROWS)}")
    check_data_format(options.data_format)


class _Loader:
    """One tokenizer and one set of options, for one source after the other."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        options: RowOptions,
        skip_bad_rows: bool,
        cache: Path | None,
        num_proc: int | None,
    ) -> None:
        self._tokenizer, self._options, self._skip = tokenizer, options, skip_bad_rows
        self._cache, self._num_proc = cache, num_proc

    def load(self, source: Source) -> TokenisedDataset:
        """The source's documents, out of the cache if it holds them."""

        def make(folder: Path | None) -> TokenisedDataset:
            return self.tokenise(read_source(source), str(source), folder)

        if self._cache is None:
            return make(None)
        options = {**asdict(self._options), "skip_bad_rows": self._skip}
        found = cached(self._cache, cache_key(source, self._tokenizer, options), make)
        found.report.source = str(source)
        return found

    def tokenise(self, rows: Iterable[Placed], name: str, folder: Path | None) -> TokenisedDataset:
        """All rows read and tokenised into the files of a folder, or into temporary ones."""
        report = DataReport(name)
        writer = TokenWriter(folder)
        num_bad, started = 0, time.monotonic()
        told = started
        try:
            for chunk in make_chunks(_pieces(rows), self._tokenizer, self._options, self._num_proc):
                chunk.documents["row"] += report.rows_read
                report.rows_read += chunk.rows_read
                report.forms += chunk.forms
                report.dropped += chunk.dropped
                report.bad_rows += chunk.bad_rows[: NAMED_ROWS - len(report.bad_rows)]
                num_bad += chunk.num_bad
                writer.add(chunk.input_ids, chunk.loss_mask, chunk.documents)
                if time.monotonic() - told > _NEWS_EVERY_S:
                    told = time.monotonic()
                    print(f"tokenising {name}: {report.rows_read:,} rows in {told - started:.0f} s", file=sys.stderr)
            self._judge(report, num_bad)
            dataset = writer.finish(report)
        finally:
            writer.close()
        if not len(dataset):
            reasons = "; ".join(f"{rows:,} {reason}" for reason, rows in report.dropped.items())
            raise UserError(
                f"{name}: no usable row among {report.rows_read:,} ({reasons}); "
                "check the row form, max_seq_length and train_on"
            )
        return dataset

    def _judge(self, report: DataReport, num_bad: int) -> None:
        """Raises: UserError if there were bad rows that are not to be skipped."""
        if not num_bad:
            return
        if self._skip:
            report.drop(BAD, num_bad)
            return
        way_out = "mend them, or leave them out with --skip_bad_rows"
        if num_bad == 1:
            raise UserError(f"{report.bad_rows[0]}\n1 of {report.rows_read:,} rows cannot be used; {way_out}")
        shown = "\n".join(f"  {message}" for message in report.bad_rows)
        raise UserError(
            f"{report.source}: {num_bad:,} of {report.rows_read:,} rows cannot be used; the first:\n{shown}\n{way_out}"
        )


def _pieces(rows: Iterable[Placed]) -> Iterator[list[Placed]]:
    """The rows, some at a time, bounded in their number and in their characters."""
    piece: list[Placed] = []
    size = 0
    for payload, place in rows:
        piece.append((payload, place))
        size += _size(payload)
        if len(piece) == ROWS_AT_ONCE or size >= CHARACTERS_AT_ONCE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _size(payload: Any) -> int:
    """About how many characters a payload has."""
    if isinstance(payload, bytes | str):
        return len(payload)
    if isinstance(payload, Mapping):
        return sum(map(_size, payload.values()))
    return sum(map(_size, payload)) if isinstance(payload, list | tuple) else 8
