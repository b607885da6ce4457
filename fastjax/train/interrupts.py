"""Signals that ask a run to end: the step at hand is finished and the state saved."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Inside the block, the first SIGINT or SIGTERM only sets `number`; a second SIGINT is a KeyboardInterrupt.

    Attributes:
      number: the signal that came, or None.

    Outside the main thread, where Python allows no handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The signal's name, such as SIGTERM."""
        assert self.number is not None, "no signal came"
        return signal.Signals(self.number).name

    def __bool__(self) -> bool:
        return self.number is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not print: the signal may have come in the middle of one, and buffered output cannot be entered twice.
        os.write(2, b"\nfinishing this step and saving; press Ctrl-C to stop at once and lose what is not saved\n")
