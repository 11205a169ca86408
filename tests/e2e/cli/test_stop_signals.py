"""Waiting for signals in a process with many files open."""

import os
import signal

from descriptors import many_descriptors
from helexa.cli.up_child_processes import StopSignals


def test_sigterm_is_received_by_a_process_with_many_open_descriptors() -> None:
    with many_descriptors(), StopSignals() as stop:
        assert not stop.wait(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
