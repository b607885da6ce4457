"""What is said of numbers that go wrong, and when they end a run."""

import json

import pytest

from fastjax.train.health import Health


def metrics(loss: float = 1.0, grad_norm: float = 0.5, targets: int = 10, finite: bool = True) -> dict:
    return {"loss_sum": loss * targets, "num_target_tokens": targets, "grad_norm": grad_norm, "finite": finite}


def settled(steps: int = 30) -> Health:
    """Losses of 1.0 to 1.2, gradient norms of half of that."""
    health = Health()
    for step in range(steps):
        assert health.look(metrics(1.0 + 0.05 * (step % 5), 0.5 + 0.025 * (step % 5))) is None
    return health


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": 2.5}, "spike: loss 2.5, where the median of the last 30 steps is 1.1"),
        ({"grad_norm": 40.0}, "spike: grad_norm 40, where the median of the last 30 steps is 0.55"),
    ],
)
def test_a_jump_is_told_and_counted(values, words):
    health = settled()
    finding = health.look(metrics(**values))
    assert finding is not None and (finding.text, finding.fatal) == (words, False)
    assert health.summary() == "0 steps skipped, 1 spikes of loss or gradient norm"


def test_a_slow_rise_values_that_always_differ_and_the_first_steps_are_no_spikes():
    assert settled(19).look(metrics(100.0)) is None
    health = Health()
    assert [health.look(metrics(1.0 + 0.01 * step)) for step in range(200)] == [None] * 200
    assert [health.look(metrics(1.0 + 2.0 * (step % 3))) for step in range(60)][30:] == [None] * 30
    assert health.look(metrics(targets=0)) is None


def test_the_first_number_that_is_not_finite_is_fatal_or_skipped_and_the_tenth_in_a_row_is_fatal():
    finding = Health("stop").look(metrics(float("nan"), finite=False))
    assert finding is not None and finding.fatal and "loss nan" in finding.text
    health = Health("skip")
    for _ in range(9):
        finding = health.look(metrics(grad_norm=float("inf"), finite=False))
        assert finding is not None and not finding.fatal and "its update is skipped" in finding.text
    assert health.look(metrics()) is None
    found = [health.look(metrics(finite=False)) for _ in range(10)]
    assert [one.fatal for one in found if one] == [False] * 9 + [True]
    assert found[-1] is not None and "after 9 skipped steps in a row" in found[-1].text
    assert health.num_skipped == 19


def test_what_a_checkpoint_keeps_goes_on_as_if_nothing_had_happened():
    health = settled()
    health.look(metrics(9.0))
    again = Health("stop", json.loads(json.dumps(health.to_dict())))
    for value in (1.0, 9.0, 1.1):
        assert again.look(metrics(value)) == health.look(metrics(value))
    assert again.to_dict() == health.to_dict()
