"""The errors a person can cause or meet, each with the exit code the command line gives it.

This module is a leaf: every room may import it, and it imports nothing.
"""


class FastjaxError(Exception):
    """Base of the errors that reach a person as a message, not as a traceback."""

    exit_code = 1


class UserError(FastjaxError, ValueError):
    """Something the caller can mend. The message says what was given, the rule, and the way out."""

    exit_code = 2


class DeviceMemoryError(FastjaxError):
    """The accelerator's memory is too small for what was asked."""

    exit_code = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is XLA's complaint that the accelerator's memory is full."""
    kind = type(error).__name__
    return kind in ("XlaRuntimeError", "JaxRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)


class NumericsError(FastjaxError):
    """Numbers went wrong during training: a loss or a gradient is NaN or infinite."""

    exit_code = 4


class ProcessLost(FastjaxError):
    """Another process of a run of several is gone; the last checkpoint is where the run goes on."""

    exit_code = 5


class Interrupted(FastjaxError):
    """A signal ended the run after its state was saved; the exit code is 128 plus the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
