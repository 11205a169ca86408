"""Loads a model: requests memory, builds the model, and checks that its logits are finite."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import torch

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.model_facts import ModelFacts
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, HostGroup, MemoryGrant, MemoryRequest
from helexa.neuron.engine.loading.build import Build, load_part
from helexa.neuron.engine.loading.fit import divide_free_memory, least_grant
from helexa.neuron.engine.loading.loaded_model import LoadedModel
from helexa.neuron.engine.loading.memory_measurement import measured_on_device
from helexa.neuron.engine.loading.memory_request import usable_memory
from helexa.neuron.engine.pipeline.layer_division import divide_layers
from helexa.neuron.engine.pipeline.messages import StageGranted
from helexa.neuron.engine.pipeline.remote_stages import RemoteStages
from helexa.neuron.engine.ranks.messages import RankLoaded
from helexa.neuron.engine.ranks.rank_processes import RankProcesses
from helexa.neuron.layers.stage import Stage
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.constants import PAGE_SIZE

_log = logging.getLogger("helexa.neuron.engine")


class NotFiniteError(ModelFileError):
    """The logits that a loaded model computes contain NaN or infinity."""


def load(
    model_path: Path,
    options: EngineOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ask: Callable[[MemoryRequest], MemoryGrant] = divide_free_memory,
    group: HostGroup | None = None,
) -> Runner:
    """Load a model and return its runner.

    If the model computes NaN or infinite logits in the dtype of the options, it is loaded again in float32.

    Args:
        model_path: a model file or folder (see `open_checkpoint`).
        on_progress: called with the bytes read so far and the total bytes while the weights load.
        ask: function that sends a memory request to the server and returns the grant. It is called before weights are
            read. On a GPU, it is called again with measured sizes after the weights are loaded.
        group: the other hosts that compute parts of the model; None if this host computes the whole model.

    Raises:
        DoesNotFitError: the model needs more memory than is free; the message contains both sizes.
        ModelFileError: the model cannot be loaded; the message says why.
        NotFiniteError: the model computes NaN or infinite logits in float32, too.
        DeviceError: the device cannot be used.
    """
    try:
        return load_once(model_path, options, on_progress, ask, group)
    except NotFiniteError as error:
        if options.dtype == "float32":
            raise
        _log.warning("%s; it is loaded again in float32", str(error))  # the error itself would keep the model alive
    gc.collect()
    torch.cuda.empty_cache()  # otherwise torch reserves the first model's memory, and the second does not fit
    return load_once(model_path, msgspec.structs.replace(options, dtype="float32"), on_progress, ask, group)


def load_once(
    model_path: Path,
    options: EngineOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ask: Callable[[MemoryRequest], MemoryGrant] = divide_free_memory,
    group: HostGroup | None = None,
) -> Runner:
    """Load a model in the dtype of the options, and return its runner.

    `load` describes the arguments and the other errors.

    Raises:
        NotFiniteError: the model computes NaN or infinite logits in this dtype.
    """
    ranks = options.tensor_parallel
    with ExitStack() as opened, ExitStack() as on_error:
        stages = None
        if group is not None:  # connect first, because starting the stage processes takes seconds
            stages = on_error.enter_context(closing(RemoteStages(group, model_path, options)))
        build = opened.enter_context(Build(model_path, options))
        total = build.checkpoint.total_bytes
        read = [0] * (1 + (0 if group is None else len(group.hosts)))

        def on_host_progress(host: int, done: int) -> None:
            read[host] = done
            on_progress(min(sum(read), total), total)

        def on_own_progress(done: int) -> None:
            if stages is not None:
                stages.check()
            on_host_progress(0, done)

        layers = [] if stages is None else _divide_among_hosts(build, stages)
        request = build.request()
        grant = ask(request)
        granted: list[StageGranted] = []
        if stages is not None:
            granted = stages.load(layers[1:], build.final_options, on_host_progress)
            grant = least_grant([(grant, request.state), *((stage.grant, stage.state) for stage in granted)])
        other_ranks = None if ranks == 1 else on_error.enter_context(closing(RankProcesses(ranks)))
        decoder, loaded = load_part(build, other_ranks, on_own_progress)
        if stages is not None:
            loaded += stages.wait_until_loaded()
        on_progress(total, total)
        others = [processes for processes in (other_ranks, stages) if processes is not None]
        encoder = build.encoder(decoder)
        model = LoadedModel(decoder, build.ops, options, others)
        if build.device.type == "cuda" and stages is None:
            request = measured_on_device(model, request, grant.sequences, lambda: on_progress(total, total))
            request = msgspec.structs.replace(request, step=request.step + build.vision_memory().step)
            grant = ask(request)
        runner, token_seconds = _start(build, model, request, grant)
        runner.encoder = encoder
        runner.facts = _facts(build, decoder, request, grant, loaded, granted, token_seconds)
        on_error.pop_all()
        return runner


def _divide_among_hosts(build: Build, stages: RemoteStages) -> list[range]:
    """Divide the layers among the hosts by their free memory, and return the layers of each host.

    The function sets the stage of `build` to the layers of host 0.
    """
    free_bytes = [usable_memory(build.device, build.options), *stages.free_memory()]
    layers = divide_layers(*build.sizes(), free_bytes)
    build.stage = Stage(layers[0], stages)
    for host, (part, free) in enumerate(zip(layers, free_bytes, strict=True)):
        _log.info("host=%d layers=%d-%d free_mb=%d", host, part.start, part.stop - 1, free >> 20)
    return layers


def _start(build: Build, model: LoadedModel, request: MemoryRequest, grant: MemoryGrant) -> tuple[Runner, float]:
    """Allocate the caches of all processes, and check that the model computes finite logits.

    Returns:
        The runner, and the duration of a step with one token.
    """
    runner = model.runner(request, grant)
    if build.options.kv_cache_mb:  # missing memory shows now, not while serving
        runner.touch_caches()
    start_time = time.perf_counter()
    if not runner.computes_finite_logits(0, 0):
        dtype = str(build.ops.dtype).removeprefix("torch.")
        raise NotFiniteError(f"{build.path.name}: its logits are not finite numbers in {dtype}")
    return runner, time.perf_counter() - start_time


def _facts(
    build: Build,
    model: Decoder,
    request: MemoryRequest,
    grant: MemoryGrant,
    loaded: Sequence[RankLoaded],
    granted: Sequence[StageGranted],
    token_seconds: float,
) -> ModelFacts:
    devices = max(len(build.options.devices), 1)  # each of which has the granted memory
    page = (request.page + sum(stage.page for stage in granted)) * devices
    state = (request.state + sum(stage.state for stage in granted)) * devices
    if state:
        _log.info("recurrent state: %.1f MiB a sequence, room for %d snapshots", state / 2**20, grant.snapshots)
    return ModelFacts(
        model_type=build.model_type,
        vocab_size=model.vocab_size,
        context_length=min(request.context, grant.pages * PAGE_SIZE),
        parameters=build.parameters,
        weight_bytes=build.total_bytes,
        step_bytes=sum(part.step_bytes for part in loaded),
        token_bytes=page // PAGE_SIZE,
        kv_bytes=grant.pages * page,
        kv_pages=grant.pages,
        state_bytes=state,
        snapshots=grant.snapshots,
        max_sequences=grant.sequences,
        memory_bytes=grant.total * devices,
        quant=build.policy.quant,
        token_seconds=token_seconds,
    )
