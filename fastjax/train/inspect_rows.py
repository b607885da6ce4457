"""The first training rows, as the model will get them: which tokens are trained, where documents begin."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from fastjax.train.config import TrainConfig
from fastjax.train.rows import set_chat_template, training_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastjax.train.data import DataReport, TrainingRows

# Tokens before another that its text may depend on: a leading space, a character of several tokens.
_CONTEXT = 8
_TRAINED, _MASKED, _BORDER, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[36m", "\x1b[0m"
_OPEN, _CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Piece:
    """One document of a row.

    Attributes:
      ids: its token ids.
      texts: the text of each token; joined they are the document's text.
      trained: whether each token is a target.
    """

    ids: list[int]
    texts: list[str]
    trained: list[bool]


@dataclass(frozen=True)
class ShownRow:
    """A row of a batch: its documents, and its tokens with padding."""

    step: int
    documents: list[Piece]
    width: int

    def __str__(self) -> str:
        tokens = sum(len(piece.ids) for piece in self.documents)
        targets = sum(sum(piece.trained) for piece in self.documents)
        return (
            f"step {self.step}, {len(self.documents)} document{'s' * (len(self.documents) != 1)}, "
            f"{tokens:,} tokens of {self.width:,}, {targets:,} targets"
        )


@dataclass(frozen=True)
class Inspection:
    """Rows in the order of training, and what became of all rows."""

    rows: list[ShownRow]
    report: "DataReport"
    eval_report: "DataReport | None"

    def to_dict(self) -> dict[str, Any]:
        """In a form that JSON takes."""
        rows = [
            {"step": row.step, "width": row.width, "documents": [vars(d) for d in row.documents]} for row in self.rows
        ]
        evaluation = None if self.eval_report is None else self.eval_report.to_dict()
        return {"rows": rows, "data": self.report.to_dict(), "eval_data": evaluation}


def inspect_run(config: TrainConfig) -> Inspection:
    """The first `config.inspect` rows of the run that the settings describe; no weight is read.

    Raises: UserError for everything that is wrong with the model's headers, the template or the rows.
    """
    from fastjax.train.parts import open_base

    assert config.inspect is not None
    base = open_base(config.model, config.adapter)
    set_chat_template(base, config)
    rows, eval_rows = training_rows(config.data, config.eval_data, config, base)
    shown = list(first_rows(rows, base.tokenizer, config, config.inspect))
    return Inspection(shown, rows.report, None if eval_rows is None else eval_rows.report)


def first_rows(
    rows: "TrainingRows", tokenizer: "PreTrainedTokenizerBase", config: TrainConfig, count: int
) -> Iterator[ShownRow]:
    """The first rows of the first epoch, as batches hold them."""
    from fastjax.train.data import train_batches

    with train_batches(
        rows,
        batch_size=config.per_device_train_batch_size * config.data_parallel_size,
        accumulation=config.gradient_accumulation_steps,
        seed=config.seed,
        num_epochs=1,
    ) as batches:
        for step, batch in enumerate(batches, start=1):
            width = batch["input_ids"].shape[-1]
            flat = {name: array.reshape(-1, width) for name, array in batch.items()}
            for ids, mask, segments in zip(flat["input_ids"], flat["loss_mask"], flat["segment_ids"], strict=True):
                if count == 0:
                    return
                if segments.any():
                    count -= 1
                    yield ShownRow(step, _documents(tokenizer, ids, mask, segments), width)


def _documents(
    tokenizer: "PreTrainedTokenizerBase", ids: np.ndarray, mask: np.ndarray, segments: np.ndarray
) -> list[Piece]:
    found = []
    for segment in range(1, int(segments.max()) + 1):
        here = segments == segment
        tokens = ids[here].tolist()
        found.append(Piece(tokens, token_texts(tokenizer, tokens), mask[here].tolist()))
    return found


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> list[str]:
    """The text that each token adds; that of a character of several tokens stands with the last of them."""

    def decode(start: int, stop: int) -> str:
        return str(tokenizer.decode(ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    texts: list[str] = []
    start = 0
    for index in range(len(ids)):
        # Only whole characters may lie before the window.
        if index - start > _CONTEXT and texts[index - _CONTEXT // 2 - 1]:
            start = index - _CONTEXT // 2
        before, now = decode(start, index), decode(start, index + 1)
        whole = before.rstrip("\ufffd")
        waiting = now.endswith("\ufffd") and index + 1 < len(ids)
        texts.append("" if waiting or not now.startswith(whole) else now[len(whole) :])
    return texts


def print_inspection(found: Inspection, stream: TextIO | None = None) -> None:
    """Prints the rows and the counts, in colours on a terminal, else with trained text in ⟦brackets⟧.

    Args: stream: None is stdout. FORCE_COLOR and NO_COLOR are heeded.
    """
    stream = stream or sys.stdout
    colours = (stream.isatty() or bool(os.environ.get("FORCE_COLOR"))) and not os.environ.get("NO_COLOR")
    trained, masked, border, plain = (_TRAINED, _MASKED, _BORDER, _PLAIN) if colours else (_OPEN, "", "", "")
    legend = f"{trained}trained{plain if colours else _CLOSE}, {masked}masked{plain}"
    print(f"{len(found.rows)} rows as they are trained: {legend}", file=stream)
    for number, row in enumerate(found.rows, start=1):
        print(f"\n{border}━━ row {number}: {row}{plain}", file=stream)
        for index, piece in enumerate(row.documents, start=1):
            if len(row.documents) > 1:
                counts = f"{len(piece.ids):,} tokens, {sum(piece.trained):,} targets"
                print(f"{border}── document {index}: {counts}{plain}", file=stream)
            for is_trained, text in _runs(piece):
                text = text.replace("\n", "↵\n")
                start = trained if is_trained else masked
                end = (plain if colours else _CLOSE) if is_trained or colours else ""
                print(f"{start}{text}{end}", end="", file=stream)
            print(file=stream)
    print(f"\n{found.report}", file=stream)
    if found.eval_report is not None:
        print(f"\n{found.eval_report}", file=stream)


def _runs(piece: Piece) -> Iterator[tuple[bool, str]]:
    """(trained, text) of consecutive tokens of one kind."""
    start = 0
    for index in range(1, len(piece.ids) + 1):
        if index == len(piece.ids) or piece.trained[index] != piece.trained[start]:
            yield piece.trained[start], "".join(piece.texts[start:index])
            start = index
