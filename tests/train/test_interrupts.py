"""The first signal is noted, a second Ctrl-C stops at once, and the handlers come back."""

import os
import signal
import threading

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
