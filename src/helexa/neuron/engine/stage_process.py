"""Process of a pipeline stage on another host: computes the steps of host 0.

The member of the host group starts the process with `StageProcesses`.
"""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import msgspec

from helexa.core.errors import DoesNotFitError, HelexaError, ModelFileError
from helexa.core.logs import quoted
from helexa.core.version import node_code_version
from helexa.neuron import tensors
from helexa.neuron.engine.deferred_modules import IMPORTED_BY_TORCH, defer
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.host_channel import Channel, ChannelError
from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import MemoryDenied, MemoryGrant, MemoryRequest, StageSetup
from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import (
    choose_backend,
    usable_device,
    with_torch_if_required,
)
from helexa.neuron.engine.loading.build import Build, build_part
from helexa.neuron.engine.loading.kv_cache_size_and_memory_request import usable_memory
from helexa.neuron.engine.model_path_and_digest import model_digest
from helexa.neuron.engine.ranks import cpu_binding
from helexa.neuron.engine.ranks.messages import Allocate, ClearPages, RankLoaded, RankProgress, RunStep, TouchCaches
from helexa.neuron.engine.ranks.rank import Rank
from helexa.neuron.engine.ranks.rank_processes import RankProcesses
from helexa.neuron.engine.stage_messages import (
    AllocateStage,
    LoadStage,
    OpenStage,
    StageFailed,
    StageGranted,
    StageOpened,
    ToStage,
    receive_hidden,
    send_hidden,
)
from helexa.neuron.layers.stage import Stage
from helexa.neuron.processes import heaps_and_shared_memory, parent_watch, stack_traces_and_exit_reasons
from helexa.neuron.tensors import Tensor

_log = logging.getLogger("helexa.neuron.engine")
_PROGRESS_STEP = 8 << 20  # bytes between two progress messages


def main() -> None:
    """Run the process of a stage until the engine closes the connection."""
    defer(IMPORTED_BY_TORCH)
    gc.disable()  # loaded objects stay alive, and scanning them would take time
    heaps_and_shared_memory.use_one_heap()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--setup-fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: stage: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent_watch.start()
    stack_traces_and_exit_reasons.register()
    code = 0
    try:
        member = socket.socket(fileno=arguments.setup_fd)
        setup = _receive(member, StageSetup)
        StageWorker(Channel(socket.socket(fileno=arguments.channel_fd), setup.channel), setup, member).run()
    except ChannelError as error:
        _log.info("engine on host 0 has ended error=%s", quoted(error))
    except SystemExit as system_exit:
        code = int(system_exit.code or 0)
    except Exception:
        _log.exception("stage process ends after an error; the engine on host 0 ends, too, and is restarted")
        code = 1
    logging.shutdown()
    os._exit(code)


class StageWorker:
    """One stage of a pipeline. It executes the messages of the engine on host 0."""

    def __init__(self, channel: Channel, setup: StageSetup, member: socket.socket) -> None:
        self._channel = channel  # connection to the engine
        self._setup = setup  # device and threads of this host
        self._member = member  # connection to the member of the host group, which grants memory
        self._resources = ExitStack()
        self._other_ranks: RankProcesses | None = None

    def run(self) -> None:
        """Load the stage's layers, and compute steps until the engine disconnects.

        Raises:
            ChannelError: the engine has closed the connection.
        """
        with self._resources:
            opened = self._channel.receive(OpenStage)
            try:
                rank = self._load(opened)
            except ChannelError:
                raise
            except Exception as error:
                self._channel.send(_failure(error, opened))
                self._channel.receive(ToStage)  # the engine closes the connection after it has read the error
                return
            while True:
                message = self._channel.receive(RunStep | ClearPages | TouchCaches)
                if self._other_ranks is not None:
                    self._other_ranks.relay(message)
                rank.handle(message)

    def _load(self, opened: OpenStage) -> Rank:
        """Load the stage's layers and allocate its caches, as the engine requests."""
        choose_backend(self._own(opened.options))  # first, because the report of an error uses the backend
        if opened.version != node_code_version():
            raise HelexaError(
                f"this host runs helexa {node_code_version()}, but host 0 runs {opened.version}; "
                "install the same version on both hosts"
            )
        model = opened.model.find()
        free = usable_memory(usable_device(self._setup.device), self._own(opened.options))
        self._channel.send(StageOpened(digest=model_digest(model), free=free, hostname=socket.gethostname()))
        order = self._channel.receive(LoadStage)
        options = self._own(order.options)
        cpu_binding.bind(options, 0)
        tensors.set_num_threads(cpu_binding.threads_of_rank(options, 0))
        stage = Stage(range(order.start, order.stop), _EngineExchange(self._channel))
        build = with_torch_if_required(model.name, lambda: Build(model, options))
        with build:
            build.stage = stage
            request = build.request()
            self._channel.send(StageGranted(grant=self._ask(request), page=request.page, state=request.state))
            if options.tensor_parallel > 1:
                self._other_ranks = self._resources.enter_context(closing(RankProcesses(options.tensor_parallel)))
            decoder, loaded = build_part(build, self._other_ranks, self._reports())
        self._channel.send(
            RankLoaded(sum(part.matrix_bytes for part in loaded), sum(part.step_bytes for part in loaded))
        )
        grant = self._channel.receive(AllocateStage).grant
        if self._other_ranks is not None:
            self._other_ranks.allocate(request, grant, measure=False)
        rank = Rank(decoder, build.ops, options)
        reply = rank.handle(Allocate(request, grant))
        assert reply is not None
        self._channel.send(reply)
        heaps_and_shared_memory.trim_heaps()
        gc.freeze()
        gc.enable()
        return rank

    def _own(self, options: EngineOptions) -> EngineOptions:
        """Return the engine's options with the device and the threads of this host."""
        return msgspec.structs.replace(options, device=self._setup.device, threads=self._setup.threads)

    def _ask(self, request: MemoryRequest) -> MemoryGrant:
        """Return the memory grant of this host's node process, or raise DoesNotFitError."""
        self._member.sendall(encode(request))
        reply = _receive(self._member, MemoryGrant | MemoryDenied)
        if isinstance(reply, MemoryDenied):
            raise DoesNotFitError(reply.message)
        return reply

    def _reports(self) -> Callable[[int], None]:
        reported = 0

        def on_progress(done: int) -> None:
            nonlocal reported
            if done - reported >= _PROGRESS_STEP:
                reported = done
                self._channel.send(RankProgress(done))

        return on_progress


class _EngineExchange:
    """`HiddenExchange` of a stage: the engine on host 0 relays the hidden states."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def receive(self, rows: int, width: int) -> Tensor:
        return receive_hidden(self._channel, rows, width)

    def send(self, hidden: Tensor, rows: int) -> Tensor:
        send_hidden(self._channel, hidden)
        return hidden


def _receive(connection: socket.socket, kind: Any) -> Any:
    """Return the next message of the node process, which sends one message at a time."""
    decoder = FrameDecoder(kind)
    while data := connection.recv(1 << 16):
        for message in decoder.feed(data):
            return message
    raise BrokenPipeError("the member of the host group has ended")


def _failure(error: Exception, opened: OpenStage) -> StageFailed:
    if isinstance(error, ModelFileError):
        return StageFailed("model_file", str(error))
    if isinstance(error, tensors.TorchRequired):  # raised by a layer after the grant, so a switch to torch is too late
        advice = 'set kernels = "torch" on all hosts, which need torch then'
        return StageFailed("model_file", f"the native kernels do not support this model ({error}); {advice}")
    if isinstance(error, DoesNotFitError):
        return StageFailed("does_not_fit", str(error))
    if isinstance(error, DeviceError):
        return StageFailed("device", str(error))
    if isinstance(error, MemoryError | tensors.OutOfMemoryError) or "allocate memory" in str(error):
        return StageFailed("does_not_fit", "the layers do not fit into memory; free memory on this host")
    _log.exception("stage not loaded stage=%d path=%s", opened.stage, quoted(opened.model.absolute))
    return StageFailed("internal", str(error) if isinstance(error, HelexaError) else type(error).__name__)


if __name__ == "__main__":
    main()
