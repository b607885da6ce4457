"""The evaluation loss: one mean over all target tokens, whatever the batches."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from fastjax.errors import UserError
from fastjax.train.mesh import put_batch, shares_threads
from fastjax.train.step import EvalStep

# Batches on their way at once: enough to keep the device busy, few enough that memory does not grow with the rows.
_IN_FLIGHT = 2


@dataclass(frozen=True)
class EvalResult:
    """loss: mean negative log-likelihood of a target token, in nats. num_target_tokens: how many there were."""

    loss: float
    num_target_tokens: int


def evaluate(
    step: EvalStep,
    trainable: Any,
    frozen: Any,
    batches: Iterable[dict[str, Any]],
    *,
    mesh: Mesh,
    stop: Callable[[], bool] = lambda: False,
    look_up: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> EvalResult | None:
    """The loss over every batch, summed in float64 and divided once.

    Args:
      step: from `make_eval_step`.
      batches: host batches of [1, B, T] arrays; all-padding rows weigh nothing.
      look_up: adds to a batch what the step reads beside it.
      stop: asked before each batch; once true, the evaluation is abandoned and None returned.
    Raises: UserError if there is no target token.
    """
    total, num_targets = 0.0, 0
    pending: deque[dict[str, jax.Array]] = deque()

    def settle() -> None:
        nonlocal total, num_targets
        sums = jax.device_get(pending.popleft())
        total += float(sums["loss_sum"])
        num_targets += int(sums["num_target_tokens"])

    in_flight = 0 if shares_threads(mesh) else _IN_FLIGHT
    for batch in batches:
        if stop():
            return None
        pending.append(step(trainable, frozen, put_batch(look_up(batch), mesh)))
        if len(pending) > in_flight:
            settle()
    while pending:
        settle()
    if num_targets == 0:
        raise UserError("the evaluation rows have no target token; check eval_data, train_on and max_seq_length")
    return EvalResult(total / num_targets, num_targets)
