"""Starts and watches the stage processes of a member host, and grants them memory."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from types import FrameType

import psutil

from helexa.core.errors import ConfigError, DoesNotFitError, HelexaError
from helexa.core.logs import quoted
from helexa.core.version import node_code_version
from helexa.http.listener import AddressInUseError, bind
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine.ipc import ENVIRONMENT
from helexa.neuron.engine.ipc.host_channel import Channel, ChannelError, SecretError, accept, connect, wait_until_closed
from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import MemoryDenied, MemoryRequest, StageSetup
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.hardware.device_choice import default_device
from helexa.neuron.host_group import HANDSHAKE_SECONDS, MAX_HANDSHAKES, GroupSettings, Join, Joined, Rejected
from helexa.neuron.processes import stack_traces_and_exit_reasons

log = logging.getLogger(__name__)

_ENDING_SECONDS = 5.0
_STACKS_SECONDS = 0.5
_MAX_STAGES = 64

_RETRY_SECONDS = 2.0


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
        """Run a stage process for the engine at `channel`, then close `channel`.

        If this host has `_MAX_STAGES` stage processes, only close `channel`. If the engine closes the connection and
        the process does not end within `_ENDING_SECONDS`, the process is killed.
        """
        if len(self._processes) >= _MAX_STAGES:
            log.error(
                "model of the host group not loaded, because this host has its maximum number of models models=%d; "
                "unload a model that uses this host",
                _MAX_STAGES,
            )
            channel.close()
            return
        own_end, stage_end = socket.socketpair()
        with own_end:
            with stage_end:
                process = _start(channel, stage_end)
            self._processes[process.pid] = process
            log.info("stage process started pid=%d", process.pid)
            threading.Thread(target=_end_after, args=(process, channel.fileno()), daemon=True).start()
            try:
                setup = StageSetup(channel=channel.state, device=self._device, threads=self._threads)
                own_end.sendall(encode(setup))
                self._serve_memory(own_end, process.pid)
            except OSError:
                pass  # the process has ended
            finally:
                code = process.wait()
                _kill(process)  # kills the ranks that the process has started
                del self._processes[process.pid]
                channel.close()
                assert process.stdin is not None
                process.stdin.close()
                log.info("stage process ended pid=%d code=%d", process.pid, code)

    def close(self) -> None:
        """Kill all stage processes."""
        for process in list(self._processes.values()):
            _kill(process)

    def _serve_memory(self, connection: socket.socket, pid: int) -> None:
        """Answer the memory requests of process `pid` until the connection closes."""
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
        stdin=subprocess.PIPE,  # if this process dies, the pipe closes, and the stage process ends
        stdout=subprocess.DEVNULL,
        env=ENVIRONMENT | os.environ,
        pass_fds=(channel.fileno(), setup.fileno()),
        start_new_session=True,
    )


def _end_after(process: subprocess.Popen[bytes], fd: int) -> None:
    """Wait until the engine closes `fd`; kill `process` if it does not end by itself."""
    wait_until_closed(fd)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_SECONDS)
        return
    log.error("stage process does not end and is killed pid=%d; its stack traces follow", process.pid)
    for number in (stack_traces_and_exit_reasons.PYTHON_SIGNAL, stack_traces_and_exit_reasons.NATIVE_SIGNAL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # stack traces of all ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STACKS_SECONDS)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_member(settings: GroupSettings, config: NeuronConfig) -> None:
    """Run a host other than host 0 until SIGTERM or SIGINT; call from the main thread.

    Raises:
        HelexaError: this host cannot join the group, because host 0 has another secret, version or number of hosts, or
            because another process uses this host's port.
    """
    stages = StageProcesses(config)
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        listener = bind((settings.own.address, settings.own.port))
    except AddressInUseError:
        raise ConfigError(
            f"port {settings.own.port} of {settings.own.address} is in use by another process; end that process, or "
            "set another [group] master_port on all hosts"
        ) from None
    with listener:
        accepting = threading.Thread(target=accept_engines, args=(listener, settings.secret, stages), daemon=True)
        accepting.start()
        try:
            _stay_joined(settings, stopping)
        finally:
            stages.close()


def _stay_joined(settings: GroupSettings, stopping: threading.Event) -> None:
    """Keep this host connected to host 0 until `stopping` is set."""
    last_problem = ""
    while not stopping.is_set():
        try:
            channel = connect(settings.master, settings.secret, source=settings.own.address, seconds=HANDSHAKE_SECONDS)
        except SecretError as error:
            raise HelexaError(f"host {settings.host} cannot join the group: {error}") from None
        except ChannelError as error:
            if str(error) != last_problem:
                fields = (settings.master, _RETRY_SECONDS, quoted(error))
                log.warning("waiting for host 0 of the host group address=%s retry_secs=%.0f error=%s", *fields)
            last_problem = str(error)
            stopping.wait(_RETRY_SECONDS)
            continue
        last_problem = ""
        try:
            channel.send(_join(settings))
            reply = channel.receive(Joined | Rejected)
            if isinstance(reply, Rejected):
                raise HelexaError(f"host {settings.host} cannot join the group: {reply.message}")
            log.info("joined the host group host=%d hosts=%d", settings.host, settings.hosts)
            while not stopping.is_set() and not wait_until_closed(channel.fileno(), 1.0):
                pass
        except ChannelError as error:
            log.warning(
                "connection to host 0 of the host group failed retry_secs=%.0f error=%s", _RETRY_SECONDS, quoted(error)
            )
            stopping.wait(_RETRY_SECONDS)
        finally:
            channel.close()
        if not stopping.is_set():
            log.warning("connection to host 0 of the host group is gone; connecting again")


def _join(settings: GroupSettings) -> Join:
    return Join(
        host=settings.host,
        hosts=settings.hosts,
        version=node_code_version(),
        hostname=socket.gethostname(),
        address=settings.own.address,
        port=settings.own.port,
        memory_mb=psutil.virtual_memory().total >> 20,
    )


def accept_engines(listener: socket.socket, secret: bytes, stages: StageProcesses) -> None:
    """Accept engines, and run a stage process for each, until `listener` closes."""
    handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)

    def serve(connection: socket.socket, address: str) -> None:
        try:
            channel = accept(connection, secret, seconds=HANDSHAKE_SECONDS)
        except ChannelError as error:
            log.warning("connection of the host group rejected address=%s error=%s", address, quoted(error))
            return
        finally:
            handshakes.release()
        stages.run(channel)

    while True:
        handshakes.acquire()
        try:
            connection, (address, *_) = listener.accept()
        except OSError:
            return  # the listener was closed
        threading.Thread(target=serve, args=(connection, address), name="host-group-engine", daemon=True).start()
