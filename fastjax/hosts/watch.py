"""One process of several that fails, or is lost, ends them all, each with a message that says why."""

import os
import threading
from contextlib import suppress
from typing import Any

from fastjax.errors import ProcessLost, is_out_of_memory
from fastjax.hosts import exchange
from fastjax.hosts.witness import Witness

_EVERY_S = 0.5
# For a process that has come to its own end, often the same one, before it is ended from here.
_PATIENCE_S = 3.0
# For the others to hear of an end, before the store of words goes with the first process.
_HEARING_S = 8.0
_FAILED, _HEARD = "end/failed", "end/heard"

_GO_ON = "Start all processes again with the same command and --resume auto to go on from the last checkpoint"


class Watch:
    """Looks twice a second whether another process has failed; if so, this one ends as well.

    Ended from here it cannot clean up: its other threads may be waiting for the process that is gone.
    """

    def __init__(self) -> None:
        self._witness = Witness(
            f"error: {exchange.this_process()} was ended from outside: it was killed, or jax ended it because another "
            f"process or its host was lost; a process that failed says so itself.\n{_GO_ON}"
        )
        self._left, self._failing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="hosts", daemon=True)
        self._thread.start()

    def fail(self, exit_code: int, message: str) -> None:
        """Tells the others that this process ends with an error, and waits until they have heard it.

        A process that has only lost another one is ended with that one's own last words, if there are any.
        """
        with suppress(RuntimeError):
            words = {"who": exchange.this_process(), "exit_code": exit_code, "message": message}
            if not exchange.put(_FAILED, words) and exit_code == ProcessLost.exit_code:
                self._thread.join()
            self._failing.set()
            self._hear()
            for process in range(exchange.num_processes()):
                with suppress(TimeoutError):
                    exchange.get(f"{_HEARD}/{process}", _HEARING_S / exchange.num_processes())

    def leave(self) -> None:
        """Returns once all processes have done their work."""
        exchange.barrier("leave")
        self._left.set()
        self._thread.join()
        self._witness.dismiss()

    def end(self, exit_code: int) -> None:
        """Ends this process at once: jax would wait at its exit for processes that are gone."""
        self._witness.dismiss()
        os._exit(exit_code)

    def _hear(self) -> None:
        with suppress(RuntimeError):
            exchange.put(f"{_HEARD}/{exchange.process_id()}", True)

    def _look(self) -> None:
        while not self._left.wait(_EVERY_S):
            try:
                failure = failed()
            except RuntimeError:
                continue  # the first process is gone: jax ends this one
            if failure is not None:
                self._hear()
                if not self._failing.wait(_PATIENCE_S):
                    os.write(2, f"error: {failure['who']} has ended: {failure['message']}\n".encode())
                    self.end(failure["exit_code"])
                return


def failed() -> dict[str, Any] | None:
    """What the first process that failed has said: who, exit_code, message."""
    return exchange.below("end").get("failed")


def lost(error: BaseException) -> ProcessLost | None:
    """The error as the loss of another process, if that is what a failed computation between processes means."""
    if exchange.num_processes() == 1 or type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError"):
        return None
    if is_out_of_memory(error):
        return None
    first = str(error).strip().splitlines()[0][:200]
    who = exchange.this_process()
    return ProcessLost(f"{who} has lost another process, which was killed or whose host is gone ({first})\n{_GO_ON}")
