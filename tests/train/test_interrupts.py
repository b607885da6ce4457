"""The first signal is noted, a second Ctrl-C stops at once, and the handlers come back."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fastjax.train.interrupts import StopSignals


def test_the_first_signal_is_noted_and_a_second_interrupt_stops_at_once(capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignals() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop and stop.name == "SIGINT"
        assert "press Ctrl-C to stop at once" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_of_two_kinds_decides():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM


def test_another_thread_trains_without_handlers():
    seen = []

    def work():
        with StopSignals() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


# A long call into C, as a compilation is one: Python handles no signal while it lasts.
_BUSY = """
import hashlib
from fastjax.train.interrupts import StopSignals
with StopSignals():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""


def test_a_second_interrupt_ends_a_process_that_python_does_not_get_to():
    process = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for _ in range(2):
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "error: interrupted\n")


def test_another_reader_of_signals_keeps_them():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.number == signal.SIGTERM
        assert os.read(reader, 1) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(before) == writer
        os.close(reader)
        os.close(writer)
