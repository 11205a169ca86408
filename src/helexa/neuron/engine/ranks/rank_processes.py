"""Starts the processes of the other ranks, sends steps to them, and watches them."""

import logging
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from helexa.core.errors import HelexaError, ModelFileError
from helexa.core.logs import quoted
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.execution.step_memory import DeviceMemory
from helexa.neuron.engine.ipc import ENVIRONMENT
from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.kv_cache_and_prefix_hashes import CacheKind
from helexa.neuron.engine.ranks.messages import (
    Allocate,
    CacheContents,
    CaptureGraph,
    ClearPages,
    Connect,
    ForgetGraphs,
    FromRank,
    LoadRank,
    RankAllocated,
    RankCaptured,
    RankFailed,
    RankLoaded,
    RankMemory,
    RankProgress,
    ReadCache,
    ReportMemory,
    RunStep,
    ToRank,
    TouchCaches,
    WriteCache,
    digest_of,
)
from helexa.neuron.engine.ranks.rank import exchange_for
from helexa.neuron.engine.step_input_and_graph_sizes import StepInput
from helexa.neuron.engine.step_input_and_graph_sizes import encode as encode_step
from helexa.neuron.ops.batch import Bucket
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.rank_group_and_shares import SharedMemory
from helexa.neuron.processes import heartbeat
from helexa.neuron.processes.stack_traces_and_exit_reasons import exit_reason

_log = logging.getLogger("helexa.neuron.engine")
_ERRORS: Mapping[str, Callable[[str], Exception]] = {
    "model_file": partial(ModelFileError, advice=""),  # the message contains the advice
    "device": DeviceError,
    "out_of_memory": MemoryError,
    "internal": HelexaError,
}


Reply = TypeVar("Reply", bound=FromRank)


class RankError(HelexaError):
    """The process of a rank ended, or sent an invalid message."""


def end_engine(message: str) -> None:
    """End this engine process, because a rank or another host is gone."""
    _log.error(
        "engine ends, because a rank or another host is gone error=%s; the node starts a new engine", quoted(message)
    )
    logging.shutdown()
    # An orderly exit could hang, because the main thread may wait in an exchange for the rank that ended.
    os._exit(1)


class RankProcesses:
    """The processes of ranks 1 to `count` - 1, which end when this process ends.

    Args:
        on_end: called in a thread with a message that says which rank ended and how, if a rank ends before `close`.
    """

    def __init__(self, count: int, on_end: Callable[[str], None] = end_engine) -> None:
        self._rendezvous = Path(tempfile.mkdtemp(prefix="helexa-ranks-"))
        self._on_end = on_end
        self._closing = False
        self._steps = 0
        self._connections: list[socket.socket] = []
        self._decoders: list[FrameDecoder] = []
        self._selector = selectors.DefaultSelector()
        self._replies: dict[int, FromRank] = {}
        self._on_progress: Callable[[int, int], None] = lambda rank, done: None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._memory_fd = SharedMemory.create()
        try:
            for rank in range(1, count):
                self._start(rank)
        except BaseException:
            self.close()
            raise
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(1, count)
        ]
        for watcher in self._watchers:
            watcher.start()

    def load(self, message: Callable[[int], LoadRank], on_progress: Callable[[int, int], None]) -> None:
        """Send the message `message(rank)` to each rank, which then starts to load.

        Methods that receive messages later call `on_progress` with (rank, bytes read by this rank).
        """
        self._on_progress = on_progress
        for rank, connection in enumerate(self._connections, start=1):
            self._send(rank, connection, message(rank))

    def check(self) -> None:
        """Handle the messages that ranks have sent, without waiting.

        Raises:
            HelexaError (or a subclass), MemoryError: a rank cannot load its part of the model, or has ended.
        """
        self._receive(timeout=0)

    def wait_until_loaded(self) -> list[RankLoaded]:
        """Wait until all ranks have loaded; return the sizes of all but rank 0.

        Raises:
            HelexaError (or a subclass), MemoryError: a rank cannot load its part of the model, or has ended.
        """
        return self._wait(RankLoaded)

    def connect(self, ops: Ops, seconds: float) -> None:
        """Connect all ranks, including rank 0 with the kernels `ops` (see `exchange_for`)."""
        rendezvous = self._rendezvous / "store"
        self._send_all(Connect(str(rendezvous), seconds))
        ops.connect(exchange_for(ops, ops.ranks, self._memory_fd, rendezvous, seconds))

    def allocate(self, request: MemoryRequest, grant: MemoryGrant, measure: bool) -> None:
        """Build a runner in all ranks (see `Allocate`), and wait; call `connect` before.

        Raises:
            HelexaError (or a subclass), MemoryError: a rank cannot allocate the memory, or has ended.
        """
        self._send_all(Allocate(request, grant, measure))
        self._wait(RankAllocated)
        # All ranks are connected now, so the rendezvous file is no longer needed. It is deleted here, because `close`
        # does not run if the engine is killed.
        shutil.rmtree(self._rendezvous, ignore_errors=True)

    def measured_memory(self) -> list[DeviceMemory]:
        """Return what all ranks but rank 0 measured since `allocate` with `measure`."""
        self._send_all(ReportMemory())
        return [reply.memory for reply in self._wait(RankMemory)]

    def capture(self, bucket: Bucket) -> None:
        """Start the capture of a bucket's graph in all ranks (see `captured`)."""
        self._send_all(CaptureGraph(bucket))

    def captured(self) -> str | None:
        """Wait for the captures; return why one failed, or None if all succeeded.

        Raises:
            HelexaError (or a subclass), MemoryError: the device of a rank failed, or a rank has ended.
        """
        replies = enumerate(self._wait(RankCaptured), start=1)
        return next((f"rank {rank}: {reply.refusal}" for rank, reply in replies if reply.refusal), None)

    def forget_graphs(self) -> None:
        """Tell all ranks to release their captured graphs; do not wait."""
        self._send_all(ForgetGraphs())

    def run(self, step: StepInput) -> None:
        """Send a step to all ranks, which compute it without sampling."""
        data = encode_step(step)
        self._send_all(RunStep(self._steps, data, digest_of(data)))
        self._steps += 1

    @property
    def reads_caches(self) -> bool:
        """Whether the processes can send parts of their caches."""
        return True

    def read_cache(self, kind: CacheKind, index: int) -> list[bytes]:
        """Return each rank's part of a KV page or a state slot."""
        self._send_all(ReadCache(kind, index))
        return [reply.contents for reply in self._wait(CacheContents)]

    def write_cache(self, kind: CacheKind, index: int, parts: Sequence[memoryview]) -> None:
        """Replace each rank's part of a KV page or a state slot."""
        for rank, (connection, part) in enumerate(zip(self._connections, parts, strict=True), start=1):
            self._send(rank, connection, WriteCache(kind, index, bytes(part)))

    def relay(self, message: RunStep | ClearPages | TouchCaches) -> None:
        """Send a message of the engine on host 0 to all ranks of this host."""
        self._send_all(message)

    def clear(self, pages: list[int]) -> None:
        """Tell all ranks to set KV pages to zero before their next step; do not wait."""
        self._send_all(ClearPages(pages))

    def touch_caches(self) -> None:
        """Tell all ranks to overwrite their whole KV caches with zeros; do not wait."""
        self._send_all(TouchCaches())

    def close(self) -> None:
        """Kill the processes of all ranks, and wait until they have ended."""
        self._closing = True
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.wait()
            connection.close()
            assert process.stdin is not None
            process.stdin.close()
        self._selector.close()
        os.close(self._memory_fd)
        shutil.rmtree(self._rendezvous, ignore_errors=True)

    def _start(self, rank: int) -> None:
        own_end, rank_end = socket.socketpair()
        with rank_end:
            # The process stays in the process group of the engine, so that a signal to the group reaches all ranks.
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "helexa.neuron.engine.rank_process"),
                    *("--rank", str(rank), "--fd", str(rank_end.fileno()), "--memory-fd", str(self._memory_fd)),
                ],
                stdin=subprocess.PIPE,  # end-of-file tells the rank that this process has ended
                stdout=subprocess.DEVNULL,
                env=ENVIRONMENT | os.environ,
                pass_fds=(rank_end.fileno(), self._memory_fd),
            )
        self._processes.append(process)
        self._connections.append(own_end)
        self._decoders.append(FrameDecoder(FromRank))
        self._selector.register(own_end, selectors.EVENT_READ, rank)

    def _watch(self, rank: int) -> None:
        ending = self._ending(rank)
        if not self._closing:
            self._on_end(ending)

    def _ending(self, rank: int) -> str:
        return f"the process of rank {rank} {exit_reason(self._processes[rank - 1].wait())}"

    def _wait(self, kind: type[Reply]) -> list[Reply]:
        """Wait until each rank has replied; return the replies in the ranks' order."""
        while len(self._replies) < len(self._connections):
            self._receive(timeout=None)
        replies: list[Reply] = []
        for rank, reply in sorted(self._replies.items()):
            if not isinstance(reply, kind):
                raise RankError(
                    f"the process of rank {rank} sent {type(reply).__name__}, expected {kind.__name__}; "
                    "load the model again"
                )
            replies.append(reply)
        self._replies.clear()
        return replies

    def _receive(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds (None: no limit) for messages, and handle them."""
        for key, _ in self._selector.select(timeout):
            rank = key.data
            data = self._connections[rank - 1].recv(1 << 16)
            if not data:
                raise RankError(self._ending(rank))
            # Progress of a rank counts as progress of the engine, because rank 0 may only be waiting for the rank.
            heartbeat.beat()
            for message in self._decoders[rank - 1].feed(data):
                if isinstance(message, RankFailed):
                    raise _ERRORS[message.kind](f"rank {rank}: {message.message}")
                if isinstance(message, RankProgress):
                    self._on_progress(rank, message.done)
                else:
                    self._replies[rank] = message

    def _send_all(self, message: ToRank) -> None:
        for rank, connection in enumerate(self._connections, start=1):
            self._send(rank, connection, message)

    def _send(self, rank: int, connection: socket.socket, message: ToRank) -> None:
        try:
            connection.sendall(encode(message))
        except OSError as error:  # only the end of the rank closes the connection
            raise RankError(self._ending(rank)) from error
