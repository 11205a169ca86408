"""Waiting for signals in a process with many files open."""

import os
import signal

from descriptors import many_descriptors
from helexa.cli.stop_signals import StopSignals


def test_a_signal_is_seen_with_many_descriptors_open() -> None:
    with many_descriptors(), StopSignals() as stop:
        assert not stop.wait(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
