"""Stages of a pipeline on other hosts: their layers, their load, their steps."""

import logging
import selectors
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

from helexa.core.errors import DoesNotFitError, HelexaError, ModelFileError
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.execution.step_memory import DeviceMemory
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.host_channel import Channel, ChannelError, connect, wait_until_closed
from helexa.neuron.engine.ipc.messages import HostGroup, MemoryGrant, MemoryRequest
from helexa.neuron.engine.kv_cache_and_prefix_hashes import CacheKind
from helexa.neuron.engine.model_path_and_digest import ModelPath, model_digest
from helexa.neuron.engine.ranks.messages import (
    ClearPages,
    RankAllocated,
    RankLoaded,
    RankProgress,
    RunStep,
    TouchCaches,
    digest_of,
)
from helexa.neuron.engine.ranks.rank_processes import end_engine
from helexa.neuron.engine.stage_messages import (
    AllocateStage,
    FromStage,
    LoadStage,
    OpenStage,
    StageFailed,
    StageGranted,
    StageOpened,
    ToStage,
    receive_hidden,
    send_hidden,
)
from helexa.neuron.engine.step_input_and_graph_sizes import StepInput
from helexa.neuron.engine.step_input_and_graph_sizes import encode as encode_step
from helexa.neuron.ops.batch import Bucket
from helexa.neuron.processes import heartbeat
from helexa.neuron.tensors import Tensor

_log = logging.getLogger("helexa.neuron.engine")
_CONNECT_SECONDS = 10.0
_ERRORS: dict[str, Callable[[str], HelexaError]] = {
    "model_file": partial(ModelFileError, advice=""),  # the message contains the advice
    "device": DeviceError,
    "does_not_fit": DoesNotFitError,
    "internal": HelexaError,
}

Reply = TypeVar("Reply", bound=FromStage)


def divide_layers(layer_bytes: Sequence[int], first_bytes: int, free_bytes: Sequence[int]) -> list[range]:
    """Divide layers among hosts to minimize the largest used share of free memory.

    Args:
        first_bytes: bytes of the embedding and the output head, which host 0 has in addition to its layers.
        free_bytes: free memory of each host.

    Returns:
        The contiguous layers of each host, at least one.

    Raises:
        HelexaError: there are more hosts than layers.
    """
    layers, hosts = len(layer_bytes), len(free_bytes)
    if hosts > layers:
        raise HelexaError(
            f"a model of {layers} layers cannot be divided among {hosts} hosts; use at most {layers} hosts"
        )
    sums = [0, *accumulate(layer_bytes)]

    def fullness(host: int, start: int, stop: int) -> float:
        own_bytes = sums[stop] - sums[start] + (first_bytes if host == 0 else 0)
        return own_bytes / max(free_bytes[host], 1)

    @cache
    def best(host: int, start: int) -> tuple[float, tuple[int, ...]]:
        """Divide the layers from `start` on among the hosts from `host` on.

        Return the fullness of the fullest of these hosts, and the end of the layers of each host.
        """
        if host == hosts - 1:
            return fullness(host, start, layers), (layers,)
        candidates = []
        # Each later host needs at least one layer.
        for stop in range(start + 1, layers - (hosts - host - 1) + 1):
            later, bounds = best(host + 1, stop)
            candidates.append((max(fullness(host, start, stop), later), (stop, *bounds)))
        return min(candidates)

    bounds = [0, *best(0, 0)[1]]
    return [range(start, stop) for start, stop in pairwise(bounds)]


class StageError(HelexaError):
    """A stage process or its host is gone, or sent an invalid message."""


class RemoteStages:
    """The stages 1 to N - 1 of a model, one on each other host of the group.

    The hidden states of a step pass through the stages in order, and the last stage returns its hidden states to this
    process (see `HiddenExchange`). The constructor connects to the hosts, which then start their stage processes and
    open the model's files. If a connection ends before `close`, this engine process ends.

    Raises:
        StageError: a host does not answer, or has another secret.
    """

    def __init__(self, group: HostGroup, model: Path, options: EngineOptions) -> None:
        self._group = group
        self._model = model
        self._closing = False
        self._steps = 0
        self._channels: list[Channel] = []
        self._early: dict[int, FromStage] = {}  # replies that `check` has received, by number of the stage
        self._on_progress: Callable[[int, int], None] = lambda stage, done: None
        try:
            for stage, host in enumerate(group.hosts, start=1):
                try:
                    channel = connect(host, group.secret, source=group.own_address, seconds=_CONNECT_SECONDS)
                except ChannelError as error:
                    raise StageError(f"host {stage} of the group: {error}") from None
                self._channels.append(channel)
                path = ModelPath.of(model)
                self._send(stage, OpenStage(version=group.version, model=path, stage=stage, options=options))
        except BaseException:
            self.close()
            raise
        for stage, channel in enumerate(self._channels, start=1):
            threading.Thread(target=self._watch, args=(stage, channel), name=f"stage-{stage}", daemon=True).start()

    def free_memory(self) -> list[int]:
        """Wait for all stages to open the model; return each host's free bytes.

        Raises:
            ModelFileError: a host does not have the model's files, or has other files.
            HelexaError: a host cannot run a stage; the message says why.
        """
        # This host computes the digest of its files while the stages compute those of their files.
        digest = model_digest(self._model)
        opened = self._replies(StageOpened)
        for stage, reply in zip(self._stages(), opened, strict=True):
            # Layers of different files would compute nonsense without an error.
            if reply.digest != digest:
                raise ModelFileError(
                    f"{self._model.name} on host {stage} ({reply.hostname}) differs from the file on host 0",
                    advice="copy the file from host 0",
                )
        return [reply.free for reply in opened]

    def load(
        self, layers: list[range], options: EngineOptions, on_progress: Callable[[int, int], None]
    ) -> list[StageGranted]:
        """Start the load of all stages; return the memory that their hosts grant.

        The stages still read their weights after the return: see `wait_until_loaded`.

        Args:
            layers: the layers of each stage after stage 0.
            on_progress: called with (stage, bytes read by this stage) by the methods that receive messages.

        Raises:
            DoesNotFitError: a stage does not fit into the free memory of its host.
            HelexaError: a stage cannot load its layers; the message says why.
        """
        self._on_progress = on_progress
        for stage, part in zip(self._stages(), layers, strict=True):
            self._send(stage, LoadStage(start=part.start, stop=part.stop, options=options))
        return self._replies(StageGranted)

    def check(self) -> None:
        """Handle the messages that stages have sent, without waiting.

        Raises:
            HelexaError: a stage cannot load its layers; the message says why.
        """
        with selectors.DefaultSelector() as selector:
            for stage in self._stages():
                # A stage in `_early` has sent its reply, and sends nothing more before the next request.
                if stage not in self._early:
                    selector.register(self._channels[stage - 1], selectors.EVENT_READ, stage)
            for key, _ in selector.select(0) if selector.get_map() else ():
                message = self._receive(key.data)
                if message is not None:
                    self._early[key.data] = message

    def wait_until_loaded(self) -> list[RankLoaded]:
        """Wait until all stages have loaded their layers, and return their sizes.

        Raises:
            HelexaError: a stage cannot load its layers; the message says why.
        """
        return self._replies(RankLoaded)

    def allocate(self, request: MemoryRequest, grant: MemoryGrant, measure: bool) -> None:
        """Allocate KV caches and buffers of the sizes in `grant` in all stages, and wait.

        The arguments `request` and `measure` have no effect.

        Raises:
            HelexaError: a stage cannot allocate the memory.
        """
        # Each stage has its own memory request, and measures no memory.
        self._send_all(AllocateStage(grant))
        self._replies(RankAllocated)

    def measured_memory(self) -> list[DeviceMemory]:
        """Return an empty list, because stages do not measure memory."""
        return []

    def capture(self, bucket: Bucket) -> None:
        """Do nothing, because steps of a pipeline run without graphs."""

    def captured(self) -> str | None:
        """Return None, because steps of a pipeline run without graphs."""

    def forget_graphs(self) -> None:
        """Do nothing, because steps of a pipeline run without graphs."""

    def run(self, step: StepInput) -> None:
        """Send the input of a step to all stages, which then wait for hidden states."""
        data = encode_step(step)
        self._send_all(RunStep(self._steps, data, digest_of(data)))
        self._steps += 1

    def clear(self, pages: list[int]) -> None:
        """Tell all stages to set KV pages to zero before their next step; do not wait."""
        self._send_all(ClearPages(pages))

    def touch_caches(self) -> None:
        """Tell all stages to overwrite their whole KV caches with zeros; do not wait."""
        self._send_all(TouchCaches())

    @property
    def reads_caches(self) -> bool:
        """Return False: the engine never reads the KV caches of other hosts."""
        return False  # reading a page over a network may take longer than computing it

    def read_cache(self, kind: CacheKind, index: int) -> list[bytes]:
        """Not supported (see `reads_caches`)."""
        raise NotImplementedError

    def write_cache(self, kind: CacheKind, index: int, parts: Sequence[memoryview]) -> None:
        """Not supported (see `reads_caches`)."""
        raise NotImplementedError

    def send(self, hidden: Tensor, rows: int) -> Tensor:
        """Pass hidden states [T, H] through all stages; return the last stage's [rows, H]."""
        for stage in self._stages():
            is_last = stage == len(self._channels)
            try:
                send_hidden(self._channels[stage - 1], hidden)
                hidden = receive_hidden(
                    self._channels[stage - 1], rows if is_last else hidden.shape[0], hidden.shape[1]
                )
            except ChannelError as error:
                raise self._lost(stage, error) from None
        return hidden

    def receive(self, rows: int, width: int) -> Tensor:
        """Raise NotImplementedError, because stage 0 has no previous stage."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections to all stages, whose processes then end."""
        self._closing = True
        for channel in self._channels:
            channel.close()

    def _stages(self) -> range:
        return range(1, len(self._channels) + 1)

    def _watch(self, stage: int, channel: Channel) -> None:
        wait_until_closed(channel.fileno())
        if not self._closing:
            host = self._group.hosts[stage - 1]
            end_engine(f"the connection to host {stage} of the group ({host}) is gone; check that its node runs")

    def _replies(self, kind: type[Reply]) -> list[Reply]:
        """Wait until each stage has replied; return the replies in the stages' order."""
        replies: list[Reply] = []
        for stage in self._stages():
            message = self._early.pop(stage, None)
            while message is None:
                message = self._receive(stage)
            if not isinstance(message, kind):
                raise StageError(
                    f"host {stage} of the group sent {type(message).__name__}, expected {kind.__name__}; "
                    "install the same helexa version on all hosts"
                )
            replies.append(message)
        return replies

    def _receive(self, stage: int) -> FromStage | None:
        """Return the next message of a stage; None if it only reports progress."""
        try:
            message: FromStage = self._channels[stage - 1].receive(FromStage)
        except ChannelError as error:
            raise self._lost(stage, error) from None
        heartbeat.beat()
        if isinstance(message, StageFailed):
            raise _ERRORS[message.kind](f"host {stage} of the group: {message.message}")
        if isinstance(message, RankProgress):
            self._on_progress(stage, message.done)
            return None
        return message

    def _send_all(self, message: ToStage) -> None:
        for stage in self._stages():
            self._send(stage, message)

    def _send(self, stage: int, message: ToStage) -> None:
        try:
            self._channels[stage - 1].send(message)
        except ChannelError as error:
            raise self._lost(stage, error) from None

    def _lost(self, stage: int, error: ChannelError) -> StageError:
        host = self._group.hosts[stage - 1]
        return StageError(f"the connection to host {stage} of the group ({host}) failed: {error}")
