"""A small process that tells what became of this one, should it be ended without a word of its own.

jax ends a process from C++ as soon as it misses another one, and the kernel ends one that is out of memory: no Python
code of the process itself runs then.
"""

import subprocess
import sys
from contextlib import suppress

# What ends the process must not end its witness first: signals of a terminal or a job manager go to both.
_SCRIPT = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if sys.stdin.buffer.read() != b".":
    os.write(2, sys.argv[1].encode())
"""


class Witness:
    """Prints `message` on stderr when this process ends, unless it was dismissed."""

    def __init__(self, message: str) -> None:
        words = [sys.executable, "-I", "-S", "-c", _SCRIPT, f"{message}\n"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def dismiss(self) -> None:
        """This process has told its end itself."""
        with suppress(OSError, ValueError):
            self._process.communicate(b".")
