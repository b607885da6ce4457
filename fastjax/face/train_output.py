"""What SFTTrainer.train gives back."""

from fastjax.train.run import RunResult


class TrainOutput(RunResult):
    """A RunResult with the names of transformers' TrainOutput: global_step, training_loss, metrics."""

    @property
    def global_step(self) -> int:
        """Optimiser steps done, those before a resume included."""
        return self.training.step
