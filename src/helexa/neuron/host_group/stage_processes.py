"""Starts and watches the stage processes of a member host, and grants them memory."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from helexa.core.errors import DoesNotFitError
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine.ipc.channel import Channel, wait_until_closed
from helexa.neuron.engine.ipc.environment import ENVIRONMENT
from helexa.neuron.engine.ipc.frames import FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import MemoryRequest
from helexa.neuron.engine.pipeline.setup_messages import MemoryDenied, StageSetup
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.hardware.discovery import default_device
from helexa.neuron.processes import stack_traces

log = logging.getLogger(__name__)

_ENDING_SECONDS = 5.0
_STACKS_SECONDS = 0.5
_MAX_STAGES = 64


class StageProcesses:
    """The stage processes of this host, one for each connected engine.

    Args:
        config: configuration of this host, which determines the device, the threads and the memory in reserve.
    """

    def __init__(self, config: NeuronConfig) -> None:
        harness = config.harness.torch
        self._device = default_device() if harness.device == "auto" else harness.device
        self._threads = harness.threads
        limits = harness.context_limit
        self._memory = MemoryGrants((limits.activation_headroom_mb + limits.min_free_floor_mb) << 20)
        self._memory_lock = threading.Lock()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def run(self, channel: Channel) -> None:
        """Run a stage process for an engine that has connected, until the process ends. Closes the channel.

        If the engine closes the connection and the process does not end within a few seconds, the process is killed.
        """
        if len(self._processes) >= _MAX_STAGES:
            log.error("host group: an engine was rejected, because %d stages are running", _MAX_STAGES)
            channel.close()
            return
        own_end, stage_end = socket.socketpair()
        with own_end:
            with stage_end:
                process = _start(channel, stage_end)
            self._processes[process.pid] = process
            log.info("host group: stage process %d started", process.pid)
            threading.Thread(target=_end_after, args=(process, channel.fileno()), daemon=True).start()
            try:
                setup = StageSetup(channel=channel.state, device=self._device, threads=self._threads)
                own_end.sendall(encode(setup))
                self._serve_memory(own_end, process.pid)
            except OSError:
                pass  # the process has ended
            finally:
                code = process.wait()
                _kill(process)  # ranks that the process has started
                del self._processes[process.pid]
                channel.close()
                assert process.stdin is not None
                process.stdin.close()
                log.info("host group: stage process %d ended with exit code %d", process.pid, code)

    def close(self) -> None:
        """Kill all stage processes."""
        for process in list(self._processes.values()):
            _kill(process)

    def _serve_memory(self, connection: socket.socket, pid: int) -> None:
        """Answer the memory requests of the stage process `pid` until it closes the connection."""
        decoder = FrameDecoder(MemoryRequest)
        while data := connection.recv(1 << 16):
            for request in decoder.feed(data):
                try:
                    with self._memory_lock:
                        reply = self._memory.grant(pid, request)
                except DoesNotFitError as error:
                    reply = MemoryDenied(str(error))
                connection.sendall(encode(reply))


def _start(channel: Channel, setup: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "helexa.neuron.engine.stage_process"),
            *("--channel-fd", str(channel.fileno()), "--setup-fd", str(setup.fileno())),
        ],
        stdin=subprocess.PIPE,  # the parent-death watch
        stdout=subprocess.DEVNULL,
        env=ENVIRONMENT | os.environ,
        pass_fds=(channel.fileno(), setup.fileno()),
        start_new_session=True,
    )


def _end_after(process: subprocess.Popen[bytes], fd: int) -> None:
    """Wait until the engine closes the connection `fd`. If the process then does not end by itself, kill it."""
    wait_until_closed(fd)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_SECONDS)
        return
    log.error("host group: stage process %d does not end and is killed", process.pid)
    for number in (stack_traces.PYTHON_SIGNAL, stack_traces.NATIVE_SIGNAL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # stack traces of all ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STACKS_SECONDS)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
