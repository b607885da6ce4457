"""Rows of people's data, as batches of tokens with their targets marked."""

from fastjax.train.data.load import LONG_ROWS, load_dataset
from fastjax.train.data.pipeline import Batches, eval_batches, steps_per_epoch, train_batches
from fastjax.train.data.report import DataReport
from fastjax.train.data.rows import FORMS
from fastjax.train.data.source import TokenisedDataset
from fastjax.train.data.tokenise import TRAIN_ON, prompt_ids

__all__ = [
    "FORMS",
    "LONG_ROWS",
    "TRAIN_ON",
    "Batches",
    "DataReport",
    "TokenisedDataset",
    "eval_batches",
    "load_dataset",
    "prompt_ids",
    "steps_per_epoch",
    "train_batches",
]
