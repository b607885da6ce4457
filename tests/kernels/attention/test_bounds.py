"""make_tile_bounds against its definition, token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.attention import make_tile_bounds


def test_spans_of_every_token():
    ids = np.array([[3, 3, 1, 1, 1, 3, 0, 0, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5], [0, 1, 0, 1, 0, 1, 0, 1, 0]])
    found = np.asarray(make_tile_bounds(jnp.asarray(ids)))
    for row, of_row in zip(ids, found, strict=True):
        for t, segment in enumerate(row):
            if segment == 0:
                assert of_row[:, t].tolist() == [9, 0, 9, 0]
                continue
            same = np.flatnonzero(row == segment)
            first = last = t
            while first > 0 and row[first - 1] == segment:
                first -= 1
            while last < 8 and row[last + 1] == segment:
                last += 1
            assert of_row[:, t].tolist() == [same[0], same[-1] + 1, first, last + 1]


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected \[B, T\]"):
        make_tile_bounds(jnp.zeros(3, jnp.int32))
