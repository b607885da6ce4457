"""What became of the rows: the numbers that open every run's log."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class DataReport:
    """Counts over one data set; rows_read == rows_used + all of dropped, and the histogram adds up to rows_used.

    forms: {row form: rows read in it}. dropped: {reason: rows}. num_tokens and num_targets are of the rows used, after
    truncation; num_tokens_cut is what truncation took from them. length_histogram: {longest length in the bin: rows}.
    """

    source: str
    rows_read: int = 0
    rows_used: int = 0
    rows_truncated: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_tokens_cut: int = 0
    longest: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    length_histogram: Counter[int] = field(default_factory=Counter)

    def drop(self, reason: str) -> None:
        """Count a row that is not trained on."""
        self.dropped[reason] += 1

    def use(self, loss_mask: np.ndarray, num_cut: int = 0) -> None:
        """Count a row that is trained on; `num_cut` tokens of it were cut off."""
        length = len(loss_mask)
        self.rows_used += 1
        self.rows_truncated += num_cut > 0
        self.num_tokens += length
        self.num_tokens_cut += num_cut
        self.num_targets += int(loss_mask.sum())
        self.longest = max(self.longest, length)
        self.length_histogram[1 << (length - 1).bit_length()] += 1

    def to_dict(self) -> dict[str, Any]:
        """The counts in a form that JSON takes."""
        histogram = {str(top): rows for top, rows in sorted(self.length_histogram.items())}
        counters = {"forms": dict(self.forms), "dropped": dict(self.dropped), "length_histogram": histogram}
        return {**vars(self), **counters}

    def __str__(self) -> str:
        forms = ", ".join(f"{rows:,} {form}" for form, rows in self.forms.items())
        dropped = "; ".join(f"{rows:,} {reason}" for reason, rows in self.dropped.items()) or "0"
        mean = self.num_tokens / max(1, self.rows_used)
        share = 100 * self.num_targets / max(1, self.num_tokens)
        lines = [
            f"data     {self.source}",
            f"rows     read {self.rows_read:,} ({forms}), used {self.rows_used:,}, dropped {dropped}",
            f"cut      {self.rows_truncated:,} rows truncated, {self.num_tokens_cut:,} tokens cut off",
            f"tokens   {self.num_tokens:,}, targets {self.num_targets:,} ({share:.1f} %)",
            f"length   mean {mean:.1f}, longest {self.longest:,}",
        ]
        most = max(self.length_histogram.values(), default=1)
        for top, rows in sorted(self.length_histogram.items()):
            lines.append(f"  {top // 2 + 1:>7,} - {top:<7,} {rows:>9,}  {'#' * max(1, round(30 * rows / most))}")
        return "\n".join(lines)
