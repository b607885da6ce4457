"""Few widths for rows of many lengths, so that a run compiles a handful of times and pads little."""

import math
from collections.abc import Sequence

import numpy as np

WIDTH_MULTIPLE = 16
MAX_BUCKETS = 4
# A further width means a further compilation of the step: it has to save this share of the padded tokens.
WORTHWHILE = 0.02
MAX_CANDIDATES = 512


def choose_widths(lengths: np.ndarray, rows_per_batch: int, max_buckets: int = MAX_BUCKETS) -> list[int]:
    """The ascending row widths, at most `max_buckets`, that batches of random rows are padded to.

    A batch of n rows needs the first width w that holds its longest row. With F(w) the share of rows of at most w
    tokens, and n draws, that width is w_j with probability F(w_j)^n - F(w_{j-1})^n, so the expected padded tokens a
    row are sum_j w_j (F(w_j)^n - F(w_{j-1})^n). This is minimised exactly over multiples of 16 by dynamic programming
    (over a coarser grid above 8,192 tokens); the last width holds the longest row. The result depends on nothing but
    the arguments.

    Args:
      lengths: [rows] int, tokens of each row, at least one row.
      rows_per_batch: rows that share one width: micro-batch rows times accumulation steps.
    """
    grid = _candidates(int(lengths.max()))
    ordered = np.sort(lengths)
    share = np.searchsorted(ordered, grid, side="right") / len(ordered)
    reach = np.concatenate([[0.0], share**rows_per_batch])  # reach[j]: no row of the batch is above grid[j - 1]
    # cost[j] with m widths: the least expected tokens of batches whose rows are all within grid[j - 1].
    step = grid[None, :] * (reach[None, 1:] - reach[:-1, None])  # from i widths covered to j: [i, j - 1]
    step[np.tril_indices(len(grid), -1)] = np.inf
    cost = np.full(len(grid) + 1, np.inf)
    cost[0] = 0.0
    plans: list[tuple[float, list[int]]] = []
    backs: list[np.ndarray] = []
    for _ in range(min(max_buckets, len(grid))):
        total = cost[:-1, None] + step
        backs.append(total.argmin(axis=0))
        cost = np.concatenate([[np.inf], total.min(axis=0)])
        plans.append((float(cost[-1]), _trace(backs, grid)))
    best = min(tokens for tokens, _ in plans)
    return next(widths for tokens, widths in plans if tokens <= best * (1 + WORTHWHILE))


def width_for(longest: int, widths: Sequence[int]) -> int:
    """The first of the ascending widths that holds a row of `longest` tokens."""
    return next(width for width in widths if width >= longest)


def expected_fill(lengths: np.ndarray, rows_per_batch: int, widths: Sequence[int]) -> float:
    """The share of a batch's tokens that are not padding, expected over random full batches."""
    ordered = np.sort(lengths)
    reach = (np.searchsorted(ordered, widths, side="right") / len(ordered)) ** rows_per_batch
    padded = float(np.dot(widths, np.diff(reach, prepend=0.0)))
    return float(lengths.mean()) / padded


def _candidates(longest: int) -> np.ndarray:
    """Ascending multiples of 16, the last one at or above `longest`."""
    top = math.ceil(longest / WIDTH_MULTIPLE)
    stride = math.ceil(top / MAX_CANDIDATES)
    return WIDTH_MULTIPLE * np.unique(np.append(np.arange(stride, top, stride), top))


def _trace(backs: Sequence[np.ndarray], grid: np.ndarray) -> list[int]:
    widths, column = [], len(grid)
    for back in reversed(backs):
        widths.append(int(grid[column - 1]))
        column = int(back[column - 1])
    return widths[::-1]
