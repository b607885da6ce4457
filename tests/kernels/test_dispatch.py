"""Which implementation a call takes."""

import pytest

from fastjax.kernels._dispatch import choose, prefer

REASONS = {"fast": None, "plain": None, "other": "needs more"}


def test_the_first_that_can_run_is_taken_unless_others_are_preferred():
    assert choose("op", None, REASONS) == "fast"
    with prefer("unknown", "other", "plain"):
        assert choose("op", None, REASONS) == "plain"
        # A name is taken all the same, or refused.
        assert choose("op", "fast", REASONS) == "fast"
        with pytest.raises(NotImplementedError, match="'other' needs more"):
            choose("op", "other", REASONS)
        with prefer("other"):
            assert choose("op", None, REASONS) == "fast"
    assert choose("op", None, REASONS) == "fast"
