"""The learning rate of every step equals the one transformers' schedulers give."""

import jax
import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.schedule import make_schedule, num_warmup_steps, total_optimizer_steps


def transformers_rates(kind, peak, warmup, total):
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rates = []
    for _ in range(total):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    "kind, warmup, total",
    [
        ("linear", 0, 7),
        ("linear", 3, 20),
        ("cosine", 0, 5),
        ("cosine", 13, 1000),
        ("constant", 0, 4),
        ("constant_with_warmup", 5, 9),
        ("linear", 6, 6),
        ("cosine", 9, 4),
    ],
)
def test_every_step_equals_transformers(kind, warmup, total):
    expected = transformers_rates(kind, 2e-4, warmup, total)
    schedule = make_schedule(kind, 2e-4, warmup_steps=warmup, total_steps=total)
    np.testing.assert_allclose([schedule(s) for s in range(total)], expected, rtol=1e-9, atol=1e-19)
    under_jit = jax.jit(jax.vmap(schedule))(np.arange(total, dtype=np.int32))
    assert under_jit.dtype == np.float32
    np.testing.assert_allclose(under_jit, expected, rtol=2e-6, atol=1e-12)


def test_ten_rows_in_windows_of_four_twice_is_a_horizon_of_six():
    total = total_optimizer_steps(steps_per_epoch=3, num_train_epochs=2)
    assert total == 6
    schedule = make_schedule("cosine", 1.0, warmup_steps=1, total_steps=total)
    np.testing.assert_allclose(
        [schedule(s) for s in range(6)], [0, 1, 0.904508, 0.654508, 0.345492, 0.095492], atol=1e-6
    )


@pytest.mark.parametrize("total, expected", [(20, 1), (21, 2), (50, 3)])
def test_warmup_ratio_rounds_up(total, expected):
    assert num_warmup_steps(total, warmup_ratio=0.05) == expected


def test_warmup_steps_win_over_the_ratio_and_max_steps_over_the_epochs():
    assert num_warmup_steps(100, warmup_steps=4, warmup_ratio=0.5) == 4
    assert total_optimizer_steps(100, 3, max_steps=7) == 7
    assert total_optimizer_steps(10, 0.25) == 3


def test_past_the_horizon_a_linear_rate_stays_at_zero():
    assert make_schedule("linear", 1.0, warmup_steps=0, total_steps=5)(9) == 0.0


@pytest.mark.parametrize(
    "kind, rate, warmup, words",
    [
        ("polynomial", 1e-3, 0, "linear, cosine"),
        ("constant", 1e-3, 3, "constant_with_warmup"),
        ("linear", -1.0, 0, "learning_rate=-1.0"),
        ("linear", float("nan"), 0, "learning_rate=nan"),
    ],
)
def test_bad_settings_are_named(kind, rate, warmup, words):
    with pytest.raises(UserError, match=words):
        make_schedule(kind, rate, warmup_steps=warmup, total_steps=10)


def test_no_step_at_all_is_refused():
    with pytest.raises(UserError, match="num_train_epochs=0"):
        total_optimizer_steps(10, 0)
