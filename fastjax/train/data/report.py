"""What became of the rows: the numbers that open every run's log."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

BAD = "that cannot be used"
HELD_OUT = "held out for evaluation"
BY_WEIGHT = "left out by their source's weight"
TOO_LONG = "longer than max_seq_length"
NOTHING_LEFT = "with no target left after truncation"


@dataclass
class DataReport:
    """Counts over one data set; rows_read == rows_used + all of dropped, and the histogram adds up to num_documents.

    forms: {row form: rows read in it}. dropped: {reason: rows}. bad_rows: messages of the first rows that could not be
    used. num_documents: what an epoch is made of, rows or their pieces, num_repeats of them once more. num_tokens and
    num_targets are of an epoch; num_tokens_cut and num_targets_cut are what truncation and splitting took.
    length_histogram: {longest length in the bin: documents}. parts: the sources' own reports, where there are several.
    num_packed_rows, packed_length: rows of a packed epoch, and their tokens with padding; 0 without packing.
    """

    source: str
    rows_read: int = 0
    rows_used: int = 0
    rows_truncated: int = 0
    rows_split: int = 0
    num_documents: int = 0
    num_repeats: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_tokens_cut: int = 0
    num_targets_cut: int = 0
    longest: int = 0
    num_packed_rows: int = 0
    packed_length: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    bad_rows: list[str] = field(default_factory=list)
    length_histogram: Counter[int] = field(default_factory=Counter)
    parts: list["DataReport"] = field(default_factory=list)

    def drop(self, reason: str, rows: int = 1) -> None:
        """Count rows that are not trained on."""
        self.dropped[reason] += rows

    def describe(self, documents: np.ndarray, identity: np.ndarray | None = None) -> None:
        """Counts what is trained on.

        Args:
          documents: [D] of dtype `dataset.DOCUMENT`, those of an epoch.
          identity: [D] int, equal for repeats of one document; None means that there are none.
        """
        lengths = documents["length"].astype(np.int64)
        distinct = documents if identity is None else documents[np.unique(identity, return_index=True)[1]]
        _, pieces = np.unique(distinct["row"], return_counts=True)
        self.rows_used = len(pieces)
        self.rows_split = int(np.count_nonzero(pieces > 1))
        # What was cut of a row stands with its first document alone.
        self.rows_truncated = int(np.count_nonzero(distinct["num_tokens_cut"]))
        self.num_tokens_cut = int(distinct["num_tokens_cut"].sum(dtype=np.int64))
        self.num_targets_cut = int(distinct["num_targets_cut"].sum(dtype=np.int64))
        self.num_documents = len(documents)
        self.num_repeats = len(documents) - len(distinct)
        self.num_tokens = int(lengths.sum())
        self.num_targets = int(documents["num_targets"].sum(dtype=np.int64))
        self.longest = int(lengths.max(initial=0))
        tops, counts = np.unique(2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64), return_counts=True)
        self.length_histogram = Counter(dict(zip(tops.tolist(), counts.tolist(), strict=True)))

    @property
    def packing_fill(self) -> float | None:
        """The share of a packed epoch's tokens that are not padding; None without packing."""
        padded = self.num_packed_rows * self.packed_length
        return self.num_tokens / padded if padded else None

    def to_dict(self) -> dict[str, Any]:
        """The counts in a form that JSON takes."""
        histogram = {str(top): rows for top, rows in sorted(self.length_histogram.items())}
        counters = {"forms": dict(self.forms), "dropped": dict(self.dropped), "length_histogram": histogram}
        parts = [part.to_dict() for part in self.parts]
        return {**vars(self), **counters, "parts": parts, "packing_fill": self.packing_fill}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DataReport":
        """The report of a `to_dict`."""
        known = {name: values[name] for name in (f.name for f in fields(cls)) if name in values}
        known["forms"], known["dropped"] = Counter(values["forms"]), Counter(values["dropped"])
        known["length_histogram"] = Counter({int(top): rows for top, rows in values["length_histogram"].items()})
        known["parts"] = [cls.from_dict(part) for part in values["parts"]]
        return cls(**known)

    def __str__(self) -> str:
        forms = ", ".join(f"{rows:,} {form}" for form, rows in self.forms.items())
        dropped = "; ".join(f"{rows:,} {reason}" for reason, rows in self.dropped.items()) or "0"
        mean = self.num_tokens / max(1, self.num_documents)
        share = 100 * self.num_targets / max(1, self.num_tokens)
        lines = [f"data     {self.source}"]
        if self.parts:
            lines += [f"  {part.source}: {part.rows_read:,} rows read, {part.rows_used:,} used" for part in self.parts]
        lines += [
            f"rows     read {self.rows_read:,} ({forms}), used {self.rows_used:,}, dropped {dropped}",
            *(f"  {message}" for message in self.bad_rows),
            f"cut      {self.rows_truncated:,} rows truncated, {self.num_tokens_cut:,} tokens cut off"
            + (f", {self.num_targets_cut:,} targets lost" if self.num_targets_cut else ""),
        ]
        if self.num_documents != self.rows_used:
            why = f"{self.rows_split:,} rows split, {self.num_repeats:,} documents repeated"
            lines.append(f"epoch    {self.num_documents:,} documents ({why})")
        lines += [
            f"tokens   {self.num_tokens:,}, targets {self.num_targets:,} ({share:.1f} %)",
            f"length   mean {mean:.1f}, longest {self.longest:,}",
        ]
        if self.packing_fill is not None:
            lines.append(
                f"packed   {self.num_packed_rows:,} rows of {self.packed_length:,} tokens, "
                f"{100 * self.packing_fill:.1f} % filled"
            )
        most = max(self.length_histogram.values(), default=1)
        for top, rows in sorted(self.length_histogram.items()):
            lines.append(f"  {top // 2 + 1:>7,} - {top:<7,} {rows:>9,}  {'#' * max(1, round(30 * rows / most))}")
        return "\n".join(lines)
