"""The stages of a model on the other hosts of a group, as the engine on host 0 uses them."""

import logging
import selectors
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from helexa.core.errors import DoesNotFitError, HelexaError, ModelFileError
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.execution.device_memory import DeviceMemory
from helexa.neuron.engine.ipc.channel import Channel, ChannelError, connect, wait_until_closed
from helexa.neuron.engine.ipc.messages import EngineOptions, HostGroup, MemoryGrant, MemoryRequest
from helexa.neuron.engine.pipeline.hidden_states import receive_hidden, send_hidden
from helexa.neuron.engine.pipeline.messages import (
    AllocateStage,
    FromStage,
    LoadStage,
    OpenStage,
    StageFailed,
    StageGranted,
    StageOpened,
    ToStage,
)
from helexa.neuron.engine.pipeline.model_digest import model_digest
from helexa.neuron.engine.pipeline.model_path import ModelPath
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
from helexa.neuron.engine.step.step_input import StepInput
from helexa.neuron.engine.step.step_input import encode as encode_step
from helexa.neuron.ops.batch import Bucket
from helexa.neuron.processes import heartbeat

_log = logging.getLogger("helexa.neuron.engine")
_CONNECT_SECONDS = 10.0
_ERRORS: dict[str, type[HelexaError]] = {
    "model_file": ModelFileError,
    "device": DeviceError,
    "does_not_fit": DoesNotFitError,
    "internal": HelexaError,
}

Reply = TypeVar("Reply", bound=FromStage)


class StageError(HelexaError):
    """A stage process or its host is gone, or sent an invalid message."""


class RemoteStages:
    """The stages 1 to N - 1 of a model, one on each other host of the group.

    All stages receive the input of each step. The hidden states of a step pass through the stages in order, and the
    last stage returns its hidden states to this process (see `HiddenExchange`).

    The constructor connects to the hosts, which then start their stage processes and open the model's files.

    Args:
        group: the hosts of the stages.
        model: path of the model's file or folder.
        options: options of the engine.
        on_end: called in a thread with a message that says which host is gone, if a connection ends before `close`.

    Raises:
        StageError: a host does not answer, or has another secret.
    """

    def __init__(
        self, group: HostGroup, model: Path, options: EngineOptions, on_end: Callable[[str], None] = end_engine
    ) -> None:
        self._group = group
        self._model = model
        self._on_end = on_end
        self._closing = False
        self._steps = 0
        self._channels: list[Channel] = []
        self._early: dict[int, FromStage] = {}
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
        """Wait until all stages have opened the model's files; return the free memory of each stage's host in bytes.

        Raises:
            ModelFileError: a host does not have the model's files, or has other files.
            HelexaError: a host cannot run a stage; the message says why.
        """
        digest = model_digest(self._model)
        opened = self._replies(StageOpened)
        for stage, reply in zip(self._stages(), opened, strict=True):
            if reply.digest != digest:
                raise ModelFileError(
                    f"{self._model.name} on host {stage} ({reply.hostname}) differs from the file on host 0; "
                    "copy the file from host 0"
                )
        return [reply.free for reply in opened]

    def load(
        self, layers: list[range], options: EngineOptions, on_progress: Callable[[int, int], None]
    ) -> list[StageGranted]:
        """Make all stages request memory and load their layers. Return the memory that their hosts grant.

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
        """Handle the messages that stages have sent, without waiting. Called while stage 0 loads its own layers.

        Raises:
            HelexaError: a stage cannot load its layers; the message says why.
        """
        with selectors.DefaultSelector() as selector:
            for stage in self._stages():
                if stage not in self._early:
                    selector.register(self._channels[stage - 1], selectors.EVENT_READ, stage)
            for key, _ in selector.select(0) if selector.get_map() else ():
                message = self._receive(key.data)
                if message is not None:
                    self._early[key.data] = message

    def wait_until_loaded(self) -> list[RankLoaded]:
        """Wait until all stages have loaded their layers, and return the sizes that the stages report.

        Raises:
            HelexaError: a stage cannot load its layers; the message says why.
        """
        return self._replies(RankLoaded)

    def allocate(self, request: MemoryRequest, grant: MemoryGrant, measure: bool) -> None:
        """Make all stages allocate KV caches and buffers of the granted sizes, and wait until they have done so.

        `request` is ignored, because each stage has its own memory request. Stages do not measure memory.

        Raises:
            HelexaError: a stage cannot allocate the memory.
        """
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
        """Send the input of a step to all stages. The stages compute it as soon as they receive hidden states."""
        data = encode_step(step)
        self._send_all(RunStep(self._steps, data, digest_of(data)))
        self._steps += 1

    def clear(self, pages: list[int]) -> None:
        """Make all stages set the contents of KV pages to zero."""
        self._send_all(ClearPages(pages))

    def touch_caches(self) -> None:
        """Make all stages write to their whole KV caches."""
        self._send_all(TouchCaches())

    def send(self, hidden: Tensor, rows: int) -> Tensor:
        """Pass hidden states [T, H] through all stages, and return the hidden states [rows, H] of the last stage."""
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
        """Close the connections to all stages, which then end."""
        self._closing = True
        for channel in self._channels:
            channel.close()

    def _stages(self) -> range:
        return range(1, len(self._channels) + 1)

    def _watch(self, stage: int, channel: Channel) -> None:
        wait_until_closed(channel.fileno())
        if not self._closing:
            self._on_end(f"the connection to host {stage} of the group ({self._group.hosts[stage - 1]}) is gone")

    def _replies(self, kind: type[Reply]) -> list[Reply]:
        """Wait until each stage has replied, and return the replies, of type `kind`, in the order of the stages."""
        replies: list[Reply] = []
        for stage in self._stages():
            message = self._early.pop(stage, None)
            while message is None:
                message = self._receive(stage)
            if not isinstance(message, kind):
                raise StageError(f"host {stage} of the group sent {type(message).__name__} instead of {kind.__name__}")
            replies.append(message)
        return replies

    def _receive(self, stage: int) -> FromStage | None:
        """Wait for the next message of a stage, and return it. Return None if it only reports progress.

        Raises:
            HelexaError: the stage has failed.
        """
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
        return StageError(f"the connection to host {stage} of the group failed: {error}")
