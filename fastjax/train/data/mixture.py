"""Several sources as one, each by its weight, and rows held out of a data set for evaluation."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fastjax.errors import UserError
from fastjax.train.data.dataset import Dataset, Selection
from fastjax.train.data.report import BY_WEIGHT, HELD_OUT, DataReport

# Streams of random numbers, so that no two choices made with one seed are alike.
_WEIGHTS, _HOLD_OUT = 1, 2


def combine(datasets: Sequence[Dataset], weights: Sequence[float], seed: int) -> Dataset:
    """The data sets' rows in one, each row `weight` times.

    A weight of 2.5 takes every row twice, and half of the rows, drawn by the seed, once more: the same ones in every
    epoch. A row's pieces stay together.

    Raises: UserError if a weight leaves nothing of any source.
    """
    if len(datasets) == 1 and weights[0] == 1:
        return datasets[0]
    parts, start = [], 0
    for number, (dataset, weight) in enumerate(zip(datasets, weights, strict=True)):
        whole, fraction = divmod(weight, 1)
        copies = [np.arange(len(dataset))] * int(whole)
        if fraction:
            copies.append(_documents_of_rows(dataset, fraction, [seed, _WEIGHTS, number]))
        parts += [start + copy for copy in copies]
        start += len(dataset)
    index = np.concatenate(parts)
    reports = [dataset.report for dataset in datasets]
    report = DataReport(", ".join(report.source for report in reports), parts=reports if len(reports) > 1 else [])
    for part in reports:
        report.rows_read += part.rows_read
        report.forms += part.forms
        report.dropped += part.dropped
        report.bad_rows += part.bad_rows
    before = sum(part.rows_used for part in reports)
    selection = Selection(datasets, index, report)
    if not len(selection):
        raise UserError(f"{report.source}: the weights leave no row; raise them")
    report.describe(selection.documents, selection.document_ids)
    if before > report.rows_used:
        report.drop(BY_WEIGHT, before - report.rows_used)
    return selection


def hold_out(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """(rows to train on, rows to evaluate on): `fraction` of the rows, at least one, drawn by the seed.

    Copies of a row, and the pieces of a split one, are on the same side.

    Raises: UserError if there are too few rows for both.
    """
    held = np.zeros(len(dataset), bool)
    held[_documents_of_rows(dataset, fraction, [seed, _HOLD_OUT])] = True
    if held.all():
        raise UserError(
            f"eval_fraction={fraction} of {dataset.report.rows_used} rows leaves none to train on; lower it, or give "
            "eval_data"
        )
    selections = []
    for mine, name in ((~held, ""), (held, " (held out)")):
        index = np.flatnonzero(mine)
        ours = dataset.report
        report = DataReport(ours.source + name, ours.rows_read, forms=Counter(ours.forms), parts=ours.parts)
        report.dropped, report.bad_rows = Counter(ours.dropped), list(ours.bad_rows)
        selection = Selection([dataset], index, report)
        report.describe(selection.documents, selection.document_ids)
        report.drop("trained on" if name else HELD_OUT, ours.rows_used - report.rows_used)
        selections.append(selection)
    return selections[0], selections[1]


def _documents_of_rows(dataset: Dataset, fraction: float, seed: Sequence[int]) -> np.ndarray:
    """Indices of all documents of a drawn part of the rows, ascending; of one row at least."""
    rows = np.unique(dataset.documents["row"])
    count = max(1, round(fraction * len(rows)))
    chosen = np.random.Generator(np.random.PCG64(list(seed))).permutation(rows)[:count]
    return np.flatnonzero(np.isin(dataset.documents["row"], chosen))
