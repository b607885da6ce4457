"""A limit on the time that code of strangers may run in this thread: a chat template can loop for ever."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_CHECK_S = 0.25  # between two looks of the watcher


class TimeIsUp(BaseException):
    """Raised inside code that ran too long; no `except Exception` of that code catches it."""


class TimeLimit:
    """Runs functions, and stops those that are not done in time.

    A watching thread raises TimeIsUp inside the caller's. It is seen between two Python instructions: one long call
    into C is not cut short. SIGALRM would do the same in the main thread only, and belongs to the program around us.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._running: dict[int, float] = {}  # {thread: its deadline}
        self._watcher: threading.Thread | None = None

    def run(self, function: Callable[[], T]) -> T:
        """What the function returns. Raises: TimeIsUp if it takes longer than the limit, and whatever it raises."""
        thread = threading.get_ident()
        with self._lock:
            self._running[thread] = time.monotonic() + self.seconds
            if self._watcher is None or not self._watcher.is_alive():
                self._watcher = threading.Thread(target=self._watch, daemon=True, name="time limit of chat templates")
                self._watcher.start()
        try:
            return function()
        finally:
            with self._lock:
                if self._running.pop(thread, None) is None:
                    # Raised, and perhaps not yet seen: it must not come up in code that has nothing to do with it.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
                    raise TimeIsUp

    def _watch(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(_CHECK_S)
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, deadline in self._running.items() if now > deadline]:
                    del self._running[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsUp))
                if self._running:
                    idle_since = now
                elif now - idle_since > 10:
                    self._watcher = None
                    return
