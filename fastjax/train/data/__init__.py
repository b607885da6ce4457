"""Rows of people's data, as batches of tokens with their targets marked."""

from fastjax.train.data.dataset import Dataset, TokenisedDataset
from fastjax.train.data.load import LONG_ROWS, load_dataset
from fastjax.train.data.mixture import hold_out
from fastjax.train.data.named_templates import NAMED_TEMPLATES, use_template
from fastjax.train.data.packing import PackedRows
from fastjax.train.data.pipeline import Batches, eval_batches, steps_per_epoch, train_batches
from fastjax.train.data.report import DataReport
from fastjax.train.data.rows import FORMS
from fastjax.train.data.tokenise import TRAIN_ON, prompt_ids

# What a run trains on: a document a row, or several.
TrainingRows = Dataset | PackedRows

__all__ = [
    "FORMS",
    "LONG_ROWS",
    "NAMED_TEMPLATES",
    "TRAIN_ON",
    "Batches",
    "DataReport",
    "Dataset",
    "PackedRows",
    "TokenisedDataset",
    "TrainingRows",
    "eval_batches",
    "hold_out",
    "load_dataset",
    "prompt_ids",
    "steps_per_epoch",
    "train_batches",
    "use_template",
]
