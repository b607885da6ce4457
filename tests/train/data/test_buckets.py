"""Row widths: few, deterministic, and as good as trying all of them."""

import itertools
import time

import numpy as np
import pytest

from fastjax.train.data.buckets import WORTHWHILE, choose_widths, expected_fill, width_for


def padded_tokens(lengths, rows, widths):
    """Expected width of a batch of `rows` draws, summed over the batch's longest length one by one."""
    total = 0.0
    for longest in sorted(set(lengths.tolist())):
        upto, below = np.mean(lengths <= longest), np.mean(lengths < longest)
        total += width_for(longest, widths) * (upto**rows - below**rows)
    return total


@pytest.mark.parametrize("rows", [1, 4])
def test_widths_are_within_the_stated_share_of_the_best_of_all(rows):
    lengths = np.random.default_rng(0).integers(3, 150, 60)
    top = -(-int(lengths.max()) // 16) * 16
    grid = range(16, top, 16)
    best = min(
        padded_tokens(lengths, rows, [*chosen, top]) for n in range(4) for chosen in itertools.combinations(grid, n)
    )
    widths = choose_widths(lengths, rows)
    assert best <= padded_tokens(lengths, rows, widths) <= best * (1 + WORTHWHILE) + 1e-9
    assert expected_fill(lengths, rows, widths) == pytest.approx(lengths.mean() / padded_tokens(lengths, rows, widths))


def test_thirty_lengths_give_at_most_four_widths():
    widths = choose_widths(np.arange(5, 35), 2)
    assert len(widths) <= 4
    assert widths == sorted(set(widths))
    assert all(width % 16 == 0 for width in widths)
    assert widths[-1] == 48


def test_equal_rows_get_one_width_and_a_far_off_one_its_own():
    assert choose_widths(np.full(50, 33), 4) == [48]
    assert choose_widths(np.array([1]), 1) == [16]
    assert choose_widths(np.array([20] * 99 + [2000]), 1) == [32, 2000]


def test_widths_do_not_depend_on_the_order_of_rows():
    lengths = np.random.default_rng(1).integers(1, 900, 500)
    assert choose_widths(lengths, 8) == choose_widths(lengths[::-1], 8)


def test_very_long_rows_are_covered_without_a_huge_grid():
    lengths = np.random.default_rng(2).integers(1, 100_001, 300)
    start = time.monotonic()
    widths = choose_widths(lengths, 2)
    assert widths[-1] >= lengths.max()
    assert widths[-1] - lengths.max() < 16
    assert time.monotonic() - start < 30
