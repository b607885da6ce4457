"""Learning rates as pure functions of the optimiser step, with the arithmetic of Hugging Face's schedulers.

Step 0 is the first update. The horizon is the number of optimiser steps of the whole run, never of micro-batches.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from fastjax.errors import UserError

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")

Schedule = Callable[[Any], Any]


def total_optimizer_steps(steps_per_epoch: int, num_train_epochs: float = 1.0, max_steps: int | None = None) -> int:
    """The number of optimiser steps of a run; a positive `max_steps` overrides the epochs.

    Args:
      steps_per_epoch: optimiser steps of one epoch, the short last window counted as one.
      num_train_epochs: may be fractional; the last part of an epoch is rounded up, as in transformers.
    Raises: UserError if nothing would be trained, or more steps than int32 counts.
    """
    if max_steps is not None and max_steps > 0:
        return max_steps
    total = math.ceil(num_train_epochs * steps_per_epoch)
    if total >= 2**31:
        raise UserError(
            f"num_train_epochs={num_train_epochs} over {steps_per_epoch} steps an epoch gives {total} optimiser steps, "
            f"and at most {2**31 - 1} can be counted; make num_train_epochs smaller, or set max_steps"
        )
    if total < 1:
        raise UserError(
            f"num_train_epochs={num_train_epochs} over {steps_per_epoch} steps an epoch gives no optimiser step; "
            "set num_train_epochs above 0, or max_steps"
        )
    return total


def num_warmup_steps(total_steps: int, warmup_steps: int | None = None, warmup_ratio: float | None = None) -> int:
    """Warm-up steps; a positive `warmup_steps` wins, otherwise the ratio of the horizon, rounded up."""
    if warmup_steps is not None and warmup_steps > 0:
        return warmup_steps
    return math.ceil(total_steps * (warmup_ratio or 0.0))


def make_schedule(kind: str, learning_rate: float, *, warmup_steps: int, total_steps: int) -> Schedule:
    """A function from the optimiser step to the learning rate of that step's update.

    With w = warmup_steps, n = total_steps: s / max(1, w) while s < w; afterwards linear is (n - s) / max(1, n - w),
    cosine is (1 + cos(pi (s - w) / max(1, n - w))) / 2, the constant ones are 1; all times `learning_rate`.

    The function takes a Python int (and then computes in float64, for logging) or a traced int32 scalar. Under jit it
    works in float32: differences are taken on integers first, and the cosine is written as sin^2 of what remains,
    which keeps its relative precision down to the last step, where 1 + cos cancels.

    Raises: UserError for an unknown kind, a negative rate, or a warm-up that `constant` would ignore.
    Source: transformers.optimization, get_scheduler.
    """
    if kind not in SCHEDULES:
        raise UserError(f"lr_scheduler_type={kind!r} is not known; choose one of {', '.join(SCHEDULES)}")
    if not learning_rate >= 0 or math.isinf(learning_rate):
        raise UserError(f"learning_rate={learning_rate} must be a finite number, 0 or more")
    if warmup_steps < 0 or (warmup_steps > 0 and kind == "constant"):
        raise UserError(
            f"a warm-up of {warmup_steps} steps does not go with lr_scheduler_type={kind!r}; "
            "use 0 steps, or lr_scheduler_type='constant_with_warmup'"
        )

    def schedule(step: Any) -> Any:
        on_host = isinstance(step, int | np.integer)
        xp: Any = np if on_host else jnp
        warm = step / max(1, warmup_steps)
        left = xp.maximum(total_steps - step, 0) / max(1, total_steps - warmup_steps)
        if kind == "linear":
            after = left
        elif kind == "cosine":
            after = xp.sin(math.pi / 2 * left) ** 2
        else:
            after = 1.0
        rate = learning_rate * xp.where(step < warmup_steps, warm, after)
        return float(rate) if on_host else rate

    return schedule
