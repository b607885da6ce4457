"""Texts of rematerialisation plans, and what they say of a model's layers."""

import pytest

from fastjax.errors import UserError
from fastjax.models.remat import POLICIES, Policy, parse_plan


@pytest.mark.parametrize(
    "text", ["full", "none", "12*no_matmul,full", "3*mid+host:layer_in,2*none", "unrolled,2*most,no_matmul"]
)
def test_a_plan_reads_back_from_its_text(text):
    plan = parse_plan(text)
    assert str(plan) == text
    assert parse_plan(str(plan)) == plan


def test_runs_of_layers_cover_the_model():
    plan = parse_plan("2*no_matmul,1*host:layer_in+mid,full")
    assert list(plan.of_layers(5)) == [
        (0, 2, POLICIES["no_matmul"]),
        (2, 1, Policy(("mid",), ("layer_in",))),
        (3, 2, POLICIES["full"]),
    ]
    assert [run[:2] for run in plan.of_layers(3)] == [(0, 2), (2, 1)]


@pytest.mark.parametrize(("text", "num_layers"), [("2*full,2*none", 5), ("6*full", 5)])
def test_a_plan_for_another_number_of_layers_is_refused(text, num_layers):
    with pytest.raises(UserError, match="the model has 5"):
        list(parse_plan(text).of_layers(num_layers))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unrolled", "not understood|neither"),
        ("full,unrolled", "not understood|neither"),
        ("unrolled,offload", "host memory"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_plan(text)
