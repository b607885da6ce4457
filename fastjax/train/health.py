"""Whether a run's numbers are well: what is not finite, and sudden jumps of loss or gradient norm."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

# A value is a spike if it is above twice the median of the steps before, and above it by more than eight times their
# median deviation: the first alone would complain of rows that differ much, the second of a loss that has settled.
_WINDOW, _FEWEST = 50, 20
_FACTOR, _DEVIATIONS = 2.0, 8.0
# Weights that give nothing but NaN do not heal.
_MOST_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True)
class Finding:
    """What to tell of a step, and whether the run must end with it."""

    text: str
    fatal: bool = False


class Health:
    """Looks at each step's loss and gradient norm.

    Attributes: num_skipped, num_spikes: of all steps so far.
    """

    def __init__(self, nonfinite: str = "stop", state: Mapping[str, Any] | None = None) -> None:
        """Args:
        nonfinite: "stop" or "skip", as the setting of that name.
        state: what `to_dict` gave, for a run that goes on; None for a new one.
        """
        state = state or {}
        self._skips = nonfinite == "skip"
        self._recent = {name: deque(state.get(name, ()), maxlen=_WINDOW) for name in ("loss", "grad_norm")}
        self.num_spikes: int = state.get("num_spikes", 0)
        self.num_skipped: int = state.get("num_skipped", 0)
        self._in_a_row: int = state.get("skipped_in_a_row", 0)

    def look(self, metrics: Mapping[str, Any]) -> Finding | None:
        """What there is to tell of a step. Args: metrics: of `step.make_train_step`, on the host."""
        targets, grad_norm = int(metrics["num_target_tokens"]), float(metrics["grad_norm"])
        loss = float(metrics["loss_sum"]) / targets if targets else None
        if not metrics["finite"]:
            return self._not_finite(f"loss {loss}, gradient norm {grad_norm}")
        self._in_a_row = 0
        spikes = [word for word in (self._spike("loss", loss), self._spike("grad_norm", grad_norm)) if word]
        if not spikes:
            return None
        self.num_spikes += 1
        return Finding(f"spike: {'; '.join(spikes)}")

    def to_dict(self) -> dict[str, Any]:
        """In a form that JSON takes."""
        return {
            **{name: list(values) for name, values in self._recent.items()},
            "num_spikes": self.num_spikes,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self._in_a_row,
        }

    def summary(self) -> str | None:
        """What to tell at the end; None if all was well."""
        if not self.num_skipped and not self.num_spikes:
            return None
        return f"{self.num_skipped} steps skipped, {self.num_spikes} spikes of loss or gradient norm"

    def _not_finite(self, what: str) -> Finding:
        if not self._skips:
            return Finding(what, fatal=True)
        self.num_skipped += 1
        self._in_a_row += 1
        if self._in_a_row == _MOST_SKIPPED_IN_A_ROW:
            return Finding(f"{what}, after {self._in_a_row - 1} skipped steps in a row", fatal=True)
        return Finding(f"{what}; its update is skipped")

    def _spike(self, name: str, value: float | None) -> str | None:
        if value is None:
            return None
        recent, found = self._recent[name], None
        if len(recent) >= _FEWEST:
            middle = median(recent)
            spread = median(abs(one - middle) for one in recent)
            if value > max(_FACTOR * middle, middle + _DEVIATIONS * spread):
                found = f"{name} {value:.4g}, where the median of the last {len(recent)} steps is {middle:.4g}"
        recent.append(value)
        return found
