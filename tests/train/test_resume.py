"""When a moved end leaves the steps already done as they would have been."""

import pytest

from fastjax.train.resume import horizon, horizon_note
from fastjax.train.schedule import make_schedule, num_warmup_steps

WARMUPS: list[dict] = [{}, {"warmup_steps": 3}, {"warmup_ratio": 0.5}]
SCHEDULES = [("constant", {})] + [(k, w) for k in ("linear", "cosine", "constant_with_warmup") for w in WARMUPS]


@pytest.mark.parametrize(("kind", "warmup"), SCHEDULES)
@pytest.mark.parametrize("step", [2, 5])
@pytest.mark.parametrize("total", [6, 10])
def test_a_moved_end_is_said_where_the_rates_of_the_steps_done_are_others(kind, warmup, step, total):
    ends = (6, total)
    warmups = [num_warmup_steps(end, **warmup) for end in ends]
    schedules = [make_schedule(kind, 1.0, warmup_steps=w, total_steps=n) for w, n in zip(warmups, ends, strict=True)]
    same = all(schedules[0](s) == schedules[1](s) for s in range(step))
    note = horizon_note(kind, step, *(horizon(n, w) for n, w in zip(ends, warmups, strict=True)))
    assert (note is None) == same
    if note is not None:
        assert "end at step 6 and now ends at step 10" in note and kind in note
