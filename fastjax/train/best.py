"""Which evaluation of a run was the best, and whether the losses have stopped falling.

All of it follows from the lines of metrics.jsonl, so that a resumed run judges as one that was not interrupted.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Best:
    """The lowest eval_loss so far.

    Attributes:
      step: its optimiser step; None before the first evaluation.
      eval_loss: infinite before the first evaluation.
      num_worse: evaluations since the last one that fell by more than the threshold.
    """

    step: int | None = None
    eval_loss: float = math.inf
    num_worse: int = 0


def best_of(lines: Iterable[Mapping[str, Any]], threshold: float = 0.0) -> Best:
    """The best evaluation among the lines of metrics.jsonl.

    Args:
      threshold: by how much a loss must be below the lowest before it to count as lower, in nats.
    Source: transformers.EarlyStoppingCallback.
    """
    best = Best()
    for line in lines:
        if "eval_loss" in line:
            loss = line["eval_loss"]
            num_worse = 0 if loss < best.eval_loss - threshold else best.num_worse + 1
            lower = loss < best.eval_loss
            best = Best(line["step"] if lower else best.step, min(loss, best.eval_loss), num_worse)
    return best
