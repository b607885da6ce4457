"""What a call of the training loop came to."""

from dataclasses import dataclass
from typing import Any

from fastjax.train.best import Best
from fastjax.train.evaluate import EvalResult


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
      step: optimiser steps done, those before a resume included.
      first_step: of these, the ones done before this call.
      epoch: passes over the data done, likewise.
      log_history: the objects of metrics.jsonl, likewise.
      training_loss: mean loss of a target token over the steps of this call; None if there was no step.
      evaluation: the last evaluation of this call, if there was one.
      best: the evaluation with the lowest loss, those before a resume included; None without evaluations.
      num_rows, num_target_tokens, num_tokens, seconds: of this call.
    """

    step: int
    first_step: int
    epoch: float
    log_history: list[dict[str, Any]]
    training_loss: float | None = None
    evaluation: EvalResult | None = None
    best: Best | None = None
    num_rows: int = 0
    num_target_tokens: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def loss(self) -> float | None:
        """Mean loss of a target token over the last logged interval; None if nothing was logged."""
        losses = [line["loss"] for line in self.log_history if "loss" in line]
        return losses[-1] if losses else None

    @property
    def metrics(self) -> dict[str, float | None]:
        """This call's figures under HF's names; train_runtime is in seconds."""
        per_second = 1 / self.seconds if self.seconds else 0.0
        return {
            "train_runtime": self.seconds,
            "train_samples_per_second": self.num_rows * per_second,
            "train_steps_per_second": (self.step - self.first_step) * per_second,
            "train_loss": self.training_loss,
            "epoch": self.epoch,
        }
