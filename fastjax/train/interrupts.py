"""Signals that ask a run to end: the step at hand is finished and the state saved."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Between a second Ctrl-C and the end of a process that Python has not got to in the meantime.
_PATIENCE_S = 2.0


class Stop:
    """Whether a signal came.

    Attributes:
      number: the signal, or None.
    """

    number: int | None = None

    @property
    def name(self) -> str:
        """The signal's name, such as SIGTERM."""
        assert self.number is not None, "no signal came"
        return signal.Signals(self.number).name

    def __bool__(self) -> bool:
        return self.number is not None


class StopSignals(Stop):
    """Inside the block, the first SIGINT or SIGTERM only sets `number`; a second SIGINT is a KeyboardInterrupt.

    Python handles signals between two of its own instructions, and a compilation is one of them: where a
    KeyboardInterrupt has not come through after two seconds, the process ends there and then with code 130. Not in a
    notebook or another interactive session, which would be lost.

    Outside the main thread, where Python allows no handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._left = threading.Event()
        self._wakeup: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
            if not hasattr(sys, "ps1") and "ipykernel" not in sys.modules:
                self._watch()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self._left.set()
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup)
        for number, handler in self._previous.items():
            # None: a handler that was not Python's, such as that of jax's preemption service.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not print: the signal may have come in the middle of one, and buffered output cannot be entered twice.
        os.write(2, b"\nfinishing this step and saving; press Ctrl-C to stop at once and lose what is not saved\n")

    def _watch(self) -> None:
        """Reads the numbers of the signals that come, as the system delivers them, in a thread of its own."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before != -1:
            # An event loop reads them: it stays as it is.
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)
            return
        self._wakeup = writer
        threading.Thread(target=self._count, args=(reader,), name="signals", daemon=True).start()

    def _count(self, reader: int) -> None:
        came = 0
        while number := os.read(reader, 1):
            came += 1
            if came > 1 and number[0] == signal.SIGINT and not self._left.wait(_PATIENCE_S):
                os.write(2, b"error: interrupted\n")
                os._exit(128 + signal.SIGINT)
        os.close(reader)
