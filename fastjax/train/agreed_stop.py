"""A signal to any process of a run stops all of them, after the same step."""

import itertools
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from fastjax.hosts import exchange
from fastjax.train.interrupts import Stop, StopSignals

_EVERY_S = 0.25
_PATIENCE_S = 30.0
_runs = itertools.count()


class AgreedStop(Stop):
    """StopSignals of all processes together: `requested` becomes true in all of them at the same call.

    All processes ask equally often, in the same order. A thread in each looks for a signal that another one has got.
    Once there is one, each tells how often it has been asked, and all stop at the first call that none has come to yet.
    Nobody is asked again before the others have answered; as the threads answer, and not the steps, no device waits.
    """

    def __init__(self) -> None:
        self._signals, self._key = StopSignals(), f"stop/{next(_runs)}"
        self._calls, self._lock, self._left = 0, threading.Lock(), threading.Event()
        self._stop: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._look, name="stop", daemon=True)

    def requested(self) -> bool:
        """Whether to stop now."""
        if exchange.num_processes() == 1:
            self.number = self._signals.number
            return bool(self)
        with self._lock:
            self._calls += 1
            if self._stop is not None and self._calls >= self._stop[0]:
                self.number = self._stop[1]
        return bool(self)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        if exchange.num_processes() > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        if exchange.num_processes() > 1:
            # Nobody waits for the answer of one that has left.
            with suppress(RuntimeError):
                exchange.put(f"{self._key}/calls/{exchange.process_id()}", self._calls)
        self._signals.__exit__(kind, error, trace)

    def _look(self) -> None:
        said = False
        # What is gone when the store of words is gone, `hosts.watch` tells.
        with suppress(RuntimeError):
            while not self._left.wait(_EVERY_S):
                if self._signals and not said:
                    said = True
                    exchange.put(f"{self._key}/signal/number", self._signals.number)
                number = exchange.below(f"{self._key}/signal").get("number")
                if number is not None:
                    self._agree(number)
                    return

    def _agree(self, number: int) -> None:
        with self._lock:
            exchange.put(f"{self._key}/calls/{exchange.process_id()}", self._calls)
            calls = [self._answer(process) for process in range(exchange.num_processes())]
            known = [count for count in calls if count is not None]
            if len(known) == len(calls):
                self._stop = max(known) + 1, number

    def _answer(self, process: int) -> int | None:
        """How often a process has been asked; it may still be compiling. None if this one leaves before it answers."""
        while True:
            with suppress(TimeoutError):
                return int(exchange.get(f"{self._key}/calls/{process}", _PATIENCE_S))
            if self._left.is_set():
                return None
