"""A few rows at a time, from what the readers yield to documents: the work that is shared out to processes.

Everything here is a function of the rows, the tokenizer and the options, whichever process does it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fastjax.errors import UserError
from fastjax.train.data.dataset import DOCUMENT
from fastjax.train.data.encoder import Encoder
from fastjax.train.data.readers import Placed, Unreadable, parse_payload
from fastjax.train.data.report import NOTHING_LEFT, TOO_LONG
from fastjax.train.data.rows import (
    AlpacaRow,
    ChatRow,
    IdsRow,
    NormalRow,
    PairRow,
    normalise,
    recognise,
    rename_columns,
)
from fastjax.train.data.template import require_chat_template
from fastjax.train.data.tokenise import TextToEncode, TokenRow, as_text, encoder_of, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMED_ROWS = 3  # bad rows that a message shows


@dataclass(frozen=True)
class RowOptions:
    """How rows become documents; see `load_dataset`."""

    max_seq_length: int
    train_on: str = "responses"
    long_rows: str = "truncate"
    vocab_size: int | None = None
    data_format: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    text_parts: tuple[str, str] | None = None


@dataclass
class Chunk:
    """What became of some rows.

    Attributes:
      input_ids [N] int32, loss_mask [N] bool, documents [D] of dtype DOCUMENT: those to be trained on, in order; rows
        are numbered from 0.
      rows_read, forms, dropped: see DataReport.
      num_bad, bad_rows: how many rows cannot be used, and the messages of the first.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    documents: np.ndarray
    rows_read: int
    forms: Counter[str]
    dropped: Counter[str]
    num_bad: int
    bad_rows: list[str]


def make_chunk(rows: Iterable[Placed], tokenizer: "PreTrainedTokenizerBase", options: RowOptions) -> Chunk:
    """The documents of the rows. Raises: UserError for what is wrong with all rows: no template, another vocabulary."""
    return _Maker(tokenizer, options).make(list(rows))


@dataclass(frozen=True)
class _Prepared:
    """A row on its way: its ids, or its text that is still to be tokenised."""

    number: int
    place: str
    row: NormalRow
    text: TextToEncode | None


class _Maker:
    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: RowOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._encoder: Encoder = encoder_of(tokenizer, len(tokenizer))
        self._forms: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._num_bad = 0
        self._bad_rows: list[str] = []
        self._kept: list[TokenRow] = []
        self._records: list[tuple[int, int, int, int, int]] = []

    def make(self, rows: list[Placed]) -> Chunk:
        prepared = [found for number, placed in enumerate(rows) if (found := self._prepare(number, placed))]
        texts = [one.text for one in prepared if one.text is not None]
        encoded = iter(tokenise(self._encoder, texts))
        for one in prepared:
            ids = one.row
            row = TokenRow(ids.input_ids, _without_first(ids.loss_mask)) if isinstance(ids, IdsRow) else next(encoded)
            self._check_vocabulary(row, one.place)
            self._keep(row, one)
        return Chunk(
            np.concatenate([row.input_ids for row in self._kept] or [np.zeros(0, np.int32)]),
            np.concatenate([row.loss_mask for row in self._kept] or [np.zeros(0, bool)]),
            np.array(self._records, DOCUMENT),
            len(rows),
            self._forms,
            self._dropped,
            self._num_bad,
            self._bad_rows,
        )

    def _prepare(self, number: int, placed: Placed) -> _Prepared | None:
        payload, place = placed
        options = self._options
        try:
            row = parse_payload(payload, place)
            if isinstance(row, Unreadable):
                raise UserError(row.message)
            row = rename_columns(row, options.columns, place)
            form = options.data_format or recognise(row, place)
            normal = normalise(row, place, form)
        except UserError as error:
            self._bad(error)
            return None
        self._forms[form] += 1
        if isinstance(normal, IdsRow):
            return _Prepared(number, place, normal, None)
        if isinstance(normal, ChatRow):
            require_chat_template(self._tokenizer, place)  # true of every row: no use in counting them
        try:
            text = as_text(self._tokenizer, normal, place, options.train_on, options.text_parts)
        except UserError as error:
            self._bad(error)
            return None
        if not text.text:  # BOS and EOS alone would teach that nothing follows nothing
            self._bad(UserError(f"{place}: {_why_no_target(normal, 0)}"))
            return None
        return _Prepared(number, place, normal, text)

    def _keep(self, row: TokenRow, one: _Prepared) -> None:
        options = self._options
        length, limit = len(row.input_ids), options.max_seq_length
        num_targets = int(row.loss_mask.sum())
        if not num_targets:
            self._bad(UserError(f"{one.place}: {_why_no_target(one.row, length)}"))
            return
        if length > limit and options.long_rows == "error":
            self._bad(
                UserError(f"{one.place}: {length:,} tokens, but max_seq_length={limit}; raise it, or set long_rows")
            )
            return
        if length > limit and options.long_rows == "drop":
            self._dropped[TOO_LONG] += 1
            return
        pieces = split_row(row, limit) if options.long_rows == "split" else [cut_row(row, limit)]
        pieces = [piece for piece in pieces if piece.loss_mask.any()]
        if not pieces:
            self._dropped[NOTHING_LEFT] += 1
            return
        num_cut = length - sum(len(piece.input_ids) for piece in pieces)
        targets_cut = num_targets - sum(int(piece.loss_mask.sum()) for piece in pieces)
        for number, piece in enumerate(pieces):
            cut = (num_cut, targets_cut) if number == 0 else (0, 0)
            self._kept.append(piece)
            self._records.append((one.number, len(piece.input_ids), int(piece.loss_mask.sum()), *cut))

    def _check_vocabulary(self, row: TokenRow, place: str) -> None:
        size = self._options.vocab_size
        if size is None or not len(row.input_ids) or row.input_ids.max() < size:
            return
        worst = int(row.input_ids.max())
        raise UserError(
            f"{place}: token id {worst} ({self._encoder.token(worst)!r}) is beyond the model's vocabulary of "
            f"{size}; the tokenizer belongs to another model, or tokens were added to it"
        )

    def _bad(self, error: UserError) -> None:
        self._num_bad += 1
        if len(self._bad_rows) < NAMED_ROWS:
            self._bad_rows.append(str(error))


def cut_row(row: TokenRow, limit: int) -> TokenRow:
    """The row's first `limit` tokens. The cut end is not closed with an EOS: the model would learn to stop there."""
    return TokenRow(row.input_ids[:limit], row.loss_mask[:limit])


def split_row(row: TokenRow, limit: int) -> list[TokenRow]:
    """The row in pieces of at most `limit` tokens.

    No piece starts with an answer that is learned without its beginning: what a cut leaves of an answer is context. A
    row that is learned whole, as text is, goes on being learned; only the first token of a piece is not.
    """
    whole = bool(row.loss_mask[1:].all())
    pieces = []
    for start in range(0, len(row.input_ids), limit):
        mask = np.array(row.loss_mask[start : start + limit])
        if start and not whole:
            masked = np.flatnonzero(~mask)
            mask[: masked[0] if masked.size else len(mask)] = False
        pieces.append(TokenRow(row.input_ids[start : start + limit], _without_first(mask)))
    return pieces


def _without_first(mask: np.ndarray) -> np.ndarray:
    """The mask with its first token no target: there is nothing to predict it from."""
    return np.concatenate([np.zeros(min(1, len(mask)), bool), mask[1:]])


def _why_no_target(row: NormalRow, length: int) -> str:
    if isinstance(row, ChatRow) and not any(message["role"] == "assistant" for message in row.messages):
        why = "there is no assistant message to learn"
    elif isinstance(row, ChatRow) and not any(row.trained):
        why = "every assistant message is marked as context (train false, weight 0, or part of the prompt)"
    elif isinstance(row, IdsRow) and length > 1:
        why = "no label after the first token is a target"
    elif isinstance(row, ChatRow | AlpacaRow):
        why = "the chat template writes nothing of its answers"
    elif length and isinstance(row, PairRow) and not row.completion:
        why = "the completion is empty"
    elif length:
        why = "it is a single token, and a token is learned from the one before"
    else:
        why = "it is empty"
    return f"no token of this row is a target: {why}"
