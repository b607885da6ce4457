"""The rows of a run, as its settings want them: tokenised, mixed, held out, packed."""

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastjax.train.config import RowConfig, TrainConfig

if TYPE_CHECKING:
    from fastjax.train.data import Dataset, TrainingRows
    from fastjax.train.parts import Base


def set_chat_template(base: "Base", config: RowConfig) -> None:
    """Gives the tokenizer the template that the settings name, if they do. Raises: UserError, see `use_template`."""
    if config.chat_template is not None:
        from fastjax.train.data import use_template

        note = use_template(base.tokenizer, config.chat_template)
        if note is not None:
            print(f"note: {note}", file=sys.stderr)


def load_rows(
    source: str | Iterable[Mapping[str, Any]],
    config: RowConfig,
    base: "Base",
    text_parts: tuple[str, str] | None = None,
) -> "Dataset":
    """The rows of files, hub ids or a list as the settings want them tokenised. Raises: as `load_dataset`."""
    from fastjax.train.data import load_dataset
    from fastjax.train.data.cache import cache_folder
    from fastjax.train.data.rows import parse_columns

    return load_dataset(
        source,
        base.tokenizer,
        max_seq_length=config.max_seq_length,
        train_on=config.train_on,
        long_rows=config.long_rows,
        vocab_size=base.config.vocab_size,
        data_format=None if config.data_format == "auto" else config.data_format,
        columns=parse_columns(config.data_columns),
        text_parts=text_parts,
        skip_bad_rows=config.skip_bad_rows,
        seed=getattr(config, "seed", 0),
        cache=cache_folder(config.data_cache_dir),
        num_proc=config.dataset_num_proc,
    )


def training_rows(
    source: str | Iterable[Mapping[str, Any]],
    eval_source: str | Iterable[Mapping[str, Any]] | None,
    config: TrainConfig,
    base: "Base",
    text_parts: tuple[str, str] | None = None,
) -> "tuple[TrainingRows, Dataset | None]":
    """(rows to train on, rows to evaluate on or None).

    Raises: UserError as `load_dataset` and `hold_out`.
    """
    from fastjax.train.data import PackedRows, hold_out

    rows = load_rows(source, config, base, text_parts)
    evaluation = None if eval_source is None else load_rows(eval_source, config, base, text_parts)
    if config.eval_fraction:
        rows, evaluation = hold_out(rows, config.eval_fraction, config.seed)
    return (PackedRows(rows, config.max_seq_length, config.seed) if config.packing else rows), evaluation
