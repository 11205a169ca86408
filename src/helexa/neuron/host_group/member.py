"""A member of a host group: joins host 0, and starts a stage process for each engine that connects."""

import logging
import signal
import socket
import threading
from types import FrameType

import psutil

from helexa.core.errors import ConfigError, HelexaError
from helexa.http.listener import AddressInUseError, bind
from helexa.neuron.code_version import code_version
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine.ipc.channel import ChannelError, SecretError, accept, connect, wait_until_closed
from helexa.neuron.host_group.membership import HANDSHAKE_SECONDS, MAX_HANDSHAKES
from helexa.neuron.host_group.messages import Join, Joined, Rejected
from helexa.neuron.host_group.settings import GroupSettings
from helexa.neuron.host_group.stage_processes import StageProcesses

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


def run_member(settings: GroupSettings, config: NeuronConfig) -> None:
    """Run a host other than host 0 until SIGTERM or SIGINT.

    The host connects to host 0, again and again if necessary.

    Raises:
        HelexaError: the host cannot be part of the group: another secret, version or number of hosts, or another
            process uses the port.
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
                log.warning("host group: waiting for host 0: %s", error)
            last_problem = str(error)
            stopping.wait(_RETRY_SECONDS)
            continue
        last_problem = ""
        try:
            channel.send(_join(settings))
            reply = channel.receive(Joined | Rejected)
            if isinstance(reply, Rejected):
                raise HelexaError(f"host {settings.host} cannot join the group: {reply.message}")
            log.info("host group: joined as host %d of %d", settings.host, settings.hosts)
            while not stopping.is_set() and not wait_until_closed(channel.fileno(), 1.0):
                pass
        except ChannelError as error:
            log.warning("host group: %s", error)
            stopping.wait(_RETRY_SECONDS)
        finally:
            channel.close()
        if not stopping.is_set():
            log.warning("host group: the connection to host 0 is gone")


def _join(settings: GroupSettings) -> Join:
    return Join(
        host=settings.host,
        hosts=settings.hosts,
        version=code_version(),
        hostname=socket.gethostname(),
        address=settings.own.address,
        port=settings.own.port,
        memory_mb=psutil.virtual_memory().total >> 20,
    )


def accept_engines(listener: socket.socket, secret: bytes, stages: StageProcesses) -> None:
    """Accept engines that connect to `listener`, and run a stage process for each, until the listener is closed."""
    handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)

    def serve(connection: socket.socket, address: str) -> None:
        try:
            channel = accept(connection, secret, seconds=HANDSHAKE_SECONDS)
        except ChannelError as error:
            log.warning("host group: connection from %s: %s", address, error)
            return
        finally:
            handshakes.release()
        stages.run(channel)

    while True:
        handshakes.acquire()
        try:
            connection, (address, *_) = listener.accept()
        except OSError:
            return  # closed
        threading.Thread(target=serve, args=(connection, address), name="host-group-engine", daemon=True).start()
