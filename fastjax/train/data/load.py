"""From a data source to tokenised rows: the one place where every row is read, counted and checked."""

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fastjax.errors import UserError
from fastjax.train.data.encoder import Encoder
from fastjax.train.data.readers import DataSource, Placed, describe_source, read_rows
from fastjax.train.data.report import DataReport
from fastjax.train.data.rows import ChatRow, check_data_format, normalise, recognise
from fastjax.train.data.source import TokenisedDataset
from fastjax.train.data.template import require_chat_template
from fastjax.train.data.tokenise import TRAIN_ON, TextToEncode, TokenRow, as_text, encoder_of, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_ROWS = ("truncate", "drop", "error")
ROWS_AT_ONCE = 1000  # texts handed to the tokenizer's threads in one call
NAMED_ROWS = 3  # bad rows that a message shows


def load_dataset(
    source: DataSource,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_seq_length: int,
    train_on: str = "responses",
    long_rows: str = "truncate",
    vocab_size: int | None = None,
    data_format: str | None = None,
    text_parts: tuple[str, str] | None = None,
) -> TokenisedDataset:
    """The source's rows, tokenised, with their targets marked and every row accounted for in `.report`.

    Args:
      source: file, folder, hub id, or rows in memory (see `read_rows`).
      tokenizer: a fast tokenizer; its chat template is used for chats, and for Alpaca rows if it has one.
      max_seq_length: tokens a row may have.
      train_on: "responses" masks everything but the answers, "all" masks nothing. Text rows are learned whole, unless
        `text_parts` tells where their answers are.
      long_rows: what happens to a longer row: "truncate" cuts its end off, "drop" leaves it out, "error" stops.
      vocab_size: the model's; ids at or above it are refused. None does not check.
      data_format: a name in FORMS for all rows; None recognises each row by its keys.
      text_parts: what stands before a user's turn and before an answer in text rows, for train_on="responses".
    Raises: UserError for bad options, unreadable sources, bad rows (the first three named, with their number), ids
      beyond the vocabulary, and for data in which no row is usable.
    """
    _check_options(max_seq_length, train_on, long_rows, data_format)
    encoder = encoder_of(tokenizer, len(tokenizer))
    report = DataReport(describe_source(source))
    collector = _Collector(report, encoder, max_seq_length, long_rows, vocab_size, text_parts)
    for placed in _chunks(read_rows(source)):
        texts = [found for row in placed if (found := collector.text(tokenizer, row, train_on, data_format))]
        collector.add(texts)
    collector.finish()
    return TokenisedDataset(collector.rows, report)


def _check_options(max_seq_length: int, train_on: str, long_rows: str, data_format: str | None) -> None:
    if max_seq_length < 2:
        raise UserError(
            f"max_seq_length={max_seq_length}; set it to at least 2, a token is learned from the one before"
        )
    if train_on not in TRAIN_ON:
        raise UserError(f"train_on={train_on!r} is not one of {', '.join(TRAIN_ON)}")
    if long_rows not in LONG_ROWS:
        raise UserError(f"long_rows={long_rows!r} is not one of {', '.join(LONG_ROWS)}")
    check_data_format(data_format)


def _chunks(rows: Iterable[Placed]) -> Iterator[list[Placed]]:
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
        yield chunk


class _Collector:
    """The rows kept so far, and the errors of those that cannot be used."""

    def __init__(
        self,
        report: DataReport,
        encoder: Encoder,
        max_seq_length: int,
        long_rows: str,
        vocab_size: int | None,
        text_parts: tuple[str, str] | None,
    ) -> None:
        self.rows: list[TokenRow] = []
        self._report, self._encoder = report, encoder
        self._max_seq_length, self._long_rows, self._vocab_size = max_seq_length, long_rows, vocab_size
        self._text_parts = text_parts
        self._errors: list[str] = []
        self._num_errors = 0

    def text(
        self, tokenizer: "PreTrainedTokenizerBase", placed: Placed, train_on: str, data_format: str | None
    ) -> tuple[TextToEncode, str] | None:
        """The row as text and its place, or None if it is bad or empty."""
        row, place = placed
        self._report.rows_read += 1
        try:
            form = data_format or recognise(row, place)
            normal = normalise(row, place, form)
        except UserError as error:
            self._bad(error)
            return None
        self._report.forms[form] += 1
        if isinstance(normal, ChatRow):
            require_chat_template(tokenizer, place)  # true of every row: no use in counting them
        try:
            text = as_text(tokenizer, normal, place, train_on, self._text_parts)
        except UserError as error:
            self._bad(error)
            return None
        if not text.text:
            self._report.drop("empty")
            return None
        return text, place

    def add(self, texts: list[tuple[TextToEncode, str]]) -> None:
        """Tokenise, and keep what is to be trained on."""
        rows = tokenise(self._encoder, [text for text, _ in texts])
        for row, (_, place) in zip(rows, texts, strict=True):
            self._check_vocabulary(row, place)
            self._keep(row, place)

    def finish(self) -> None:
        """Raises: UserError if there were bad rows, or if nothing is left."""
        report = self._report
        if self._num_errors == 1:
            raise UserError(self._errors[0])
        if self._errors:
            total = report.rows_read
            shown = "\n".join(f"  {error}" for error in self._errors)
            raise UserError(
                f"{report.source}: {self._num_errors:,} of {total:,} rows cannot be used; the first:\n{shown}"
            )
        if not self.rows:
            reasons = "; ".join(f"{rows:,} {reason}" for reason, rows in report.dropped.items())
            raise UserError(
                f"{report.source}: no usable row among {report.rows_read:,} ({reasons}); "
                "check the row form, max_seq_length and train_on"
            )

    def _keep(self, row: TokenRow, place: str) -> None:
        length, limit = len(row.input_ids), self._max_seq_length
        num_cut = max(0, length - limit)
        if num_cut and self._long_rows == "error":
            self._bad(UserError(f"{place}: {length:,} tokens, but max_seq_length={limit}; raise it, or set long_rows"))
            return
        if num_cut and self._long_rows == "drop":
            self._report.drop("longer than max_seq_length")
            return
        # The cut end is not closed with an EOS: the model would learn to stop in the middle.
        row = TokenRow(row.input_ids[:limit], row.loss_mask[:limit])
        if not row.loss_mask.any():
            self._report.drop("with no target left after truncation" if num_cut else "with no target")
            return
        self._report.use(row.loss_mask, num_cut)
        self.rows.append(row)

    def _check_vocabulary(self, row: TokenRow, place: str) -> None:
        if self._vocab_size is None or not len(row.input_ids) or row.input_ids.max() < self._vocab_size:
            return
        worst = int(row.input_ids.max())
        raise UserError(
            f"{place}: token id {worst} ({self._encoder.token(worst)!r}) is beyond the model's vocabulary of "
            f"{self._vocab_size}; the tokenizer belongs to another model, or tokens were added to it"
        )

    def _bad(self, error: UserError) -> None:
        self._num_errors += 1
        if len(self._errors) < NAMED_ROWS:
            self._errors.append(str(error))
