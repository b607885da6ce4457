"""How far a run is, on stderr: a bar in a terminal, and plain lines at a bounded rate anywhere else."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

# Between two plain lines; the last logged step and evaluations have theirs in any case.
_EVERY_S = 3.0


class Progress:
    """Steps done of all; a log that is redirected gets no carriage return."""

    def __init__(
        self,
        total: int,
        initial: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        silent: bool = False,
    ) -> None:
        """Args: initial: steps done before. stream: None is stderr. clock: seconds. silent: show nothing at all."""
        self._total, self._clock = total, clock
        self._stream, self._silent = stream or sys.stderr, silent
        self._bar = None
        self._last: float | None = None
        if self._stream.isatty() and not silent:
            self._bar = tqdm(total=total, initial=initial, unit="step", dynamic_ncols=True, file=self._stream)

    def step(self) -> None:
        """One more step is on its way."""
        if self._bar is not None:
            self._bar.update()

    def logged(self, line: dict[str, Any]) -> None:
        """Shows a line of metrics.jsonl."""
        loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
        speed = f"{line['tokens_per_second']:.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss}, {speed}")
            return
        now = self._clock()
        if self._last is None or now - self._last >= _EVERY_S or line["step"] == self._total:
            self._last = now
            self._print(f"step {line['step']}/{self._total} loss {loss} {speed}")

    def evaluated(self, line: dict[str, Any]) -> None:
        """Shows an evaluation's line of metrics.jsonl."""
        text = f"step {line['step']}/{self._total} eval_loss {line['eval_loss']:.4f}"
        self.note(text)

    def note(self, text: str) -> None:
        """Shows a line of its own."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        if not self._silent:
            print(text, file=self._stream, flush=True)
