"""Loads a model: requests memory, builds it, checks its logits."""

import dataclasses
import gc
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from helexa.core.errors import DoesNotFitError, HelexaError, ModelFileError, not_installed
from helexa.core.logs import quoted
from helexa.neuron import tensors
from helexa.neuron.engine.execution.device_errors import DeviceError, is_out_of_memory
from helexa.neuron.engine.execution.runner import ModelFacts, Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.message_and_pixel_sockets import encode, receive
from helexa.neuron.engine.ipc.messages import (
    FromEngine,
    HostGroup,
    LoadFailed,
    MemoryGrant,
    MemoryRequest,
    Progress,
    Ready,
)
from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import choose_backend, with_torch_if_required
from helexa.neuron.engine.loading.build import Build, build_part
from helexa.neuron.engine.loading.draft import DraftPart, open_draft
from helexa.neuron.engine.loading.kv_cache_size_and_memory_request import usable_memory
from helexa.neuron.engine.loading.loaded_model_and_measured_memory import LoadedModel, measured_on_device
from helexa.neuron.engine.loading.memory_division import divide_free_memory, least_grant
from helexa.neuron.engine.ranks.cpu_binding import threads_of_rank
from helexa.neuron.engine.ranks.messages import RankLoaded
from helexa.neuron.engine.ranks.rank_processes import RankProcesses
from helexa.neuron.engine.remote_stages import RemoteStages, divide_layers
from helexa.neuron.engine.stage_messages import StageGranted
from helexa.neuron.layers.stage import Stage
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.kernel_header import PAGE_SIZE

_log = logging.getLogger("helexa.neuron.engine")
_PROGRESS_STEP = 8 << 20  # bytes between two progress messages


class NotFiniteError(ModelFileError):
    """The logits that a loaded model computes contain NaN or infinity."""


def load(
    model_path: Path,
    options: EngineOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ask: Callable[[MemoryRequest], MemoryGrant] = divide_free_memory,
    group: HostGroup | None = None,
) -> Runner:
    """Load a model and return its runner; retry in float32 if logits are not finite.

    Args:
        on_progress: called with the bytes read so far and the total bytes while the weights load.
        ask: function that sends a memory request to the server and returns the grant. On a GPU, it is called again with
            measured sizes after the weights are loaded.
        group: the other hosts that compute parts of the model; None if this host computes the whole model.

    Raises:
        DoesNotFitError: the model needs more memory than is free; the message contains both sizes.
        ModelFileError: the model cannot be loaded; the message says why. For example, it requires torch, and torch is
            not installed.
        NotFiniteError: the logits are NaN or infinite in float32, too, or float32 cannot be used without torch.
        DeviceError: the device cannot be used.
    """

    def load_in(options: EngineOptions) -> Runner:
        return with_torch_if_required(model_path.name, lambda: load_once(model_path, options, on_progress, ask, group))

    try:
        # Activations of some models overflow in 16 bits, so float32 is tried before the load fails.
        return load_in(options)
    except NotFiniteError as error:
        if options.dtype == "float32":
            raise
        if not tensors.torch_is_installed():
            raise NotFiniteError(
                f"{error.problem}; only torch can use float32, and {not_installed('torch', 'gpu')}", advice=""
            ) from None
        # Only the text of the error is kept: the error itself would keep the model in memory.
        _log.warning("model is loaded again in float32 error=%s path=%s", quoted(error.problem), quoted(model_path))
    gc.collect()
    if tensors.uses_torch():
        tensors.cuda.empty_cache()  # otherwise torch would keep the first model's memory reserved
    return load_in(msgspec.structs.replace(options, dtype="float32"))


def load_once(
    model_path: Path,
    options: EngineOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ask: Callable[[MemoryRequest], MemoryGrant] = divide_free_memory,
    group: HostGroup | None = None,
) -> Runner:
    """Load a model in the dtype of the options, and return its runner (see `load`).

    Raises:
        NotFiniteError: the model computes NaN or infinite logits in this dtype.
        TorchRequired: the model requires torch (see `with_torch_if_required`).
    """
    ranks = options.tensor_parallel
    with ExitStack() as opened, ExitStack() as on_error:
        build = opened.enter_context(Build(model_path, options))
        draft = open_draft(build)
        if draft is not None:
            opened.enter_context(draft)
        stages = None
        if group is not None:
            stages = on_error.enter_context(closing(RemoteStages(group, model_path, options)))
        total = build.checkpoint.total_bytes + (0 if draft is None else draft.checkpoint.total_bytes)
        read = [0] * (1 + (0 if group is None else len(group.hosts)))

        def on_host_progress(host: int, done: int) -> None:
            read[host] = done
            on_progress(min(sum(read), total), total)

        def on_own_progress(done: int) -> None:
            if stages is not None:
                stages.check()
            on_host_progress(0, done)

        # The layers of this host must be known before its memory request.
        layers = [] if stages is None else _divide_among_hosts(build, stages)
        request = build.request()
        if draft is not None:
            request = draft.added_to(request)
        grant = ask(request)
        granted: list[StageGranted] = []
        if stages is not None:
            granted = stages.load(layers[1:], build.final_options, on_host_progress)
            grant = least_grant([(grant, request.state), *((stage.grant, stage.state) for stage in granted)])
        other_ranks = None if ranks == 1 else on_error.enter_context(closing(RankProcesses(ranks)))
        decoder, loaded = build_part(build, other_ranks, on_own_progress)
        if stages is not None:
            loaded += stages.wait_until_loaded()
        done = build.checkpoint.total_bytes
        draft_decoder = None if draft is None else draft.load(decoder, lambda read, _: on_own_progress(done + read))
        on_progress(total, total)
        others = tuple(processes for processes in (other_ranks, stages) if processes is not None)
        encoder = build.encoder(decoder)
        model = LoadedModel(decoder, build.ops, options, others)
        if build.device.type == "cuda" and stages is None:
            request = measured_on_device(model, request, grant.sequences, lambda: on_progress(total, total))
            request = msgspec.structs.replace(request, step=request.step + build.vision_memory().step)
            grant = ask(request)
        runner, token_seconds = _start(build, model, request, grant)
        runner.encoder = encoder
        sharing = draft_decoder if isinstance(draft, DraftPart) else None  # a draft head has KV pages of its own
        runner.facts = _facts(build, decoder, request, grant, loaded, granted, token_seconds, sharing)
        if draft is not None and draft_decoder is not None:
            own, limits = draft.start(draft_decoder, grant, build.ops.step_bytes)
            runner.draft, runner.draft_head = (None, own) if limits.is_head else (own, None)
            runner.facts = dataclasses.replace(runner.facts, drafts=limits)
        # From here on, the runner owns the other processes and ends them.
        on_error.pop_all()
        return runner


def _divide_among_hosts(build: Build, stages: RemoteStages) -> list[range]:
    """Return each host's layers, divided by free memory; give `build` those of host 0."""
    free_bytes = [usable_memory(build.device, build.options), *stages.free_memory()]
    layers = divide_layers(*build.sizes(), free_bytes)
    build.stage = Stage(layers[0], stages)
    for host, (part, free) in enumerate(zip(layers, free_bytes, strict=True)):
        _log.info("layers assigned host=%d layers=%d-%d free_mb=%d", host, part.start, part.stop - 1, free >> 20)
    return layers


def _start(build: Build, model: LoadedModel, request: MemoryRequest, grant: MemoryGrant) -> tuple[Runner, float]:
    """Allocate the caches, and raise NotFiniteError if the logits are not finite.

    Returns:
        The runner, and the measured seconds of a step with one token.
    """
    runner = model.runner(request, grant)
    if build.options.kv_cache_mb:  # so that too little memory makes the load fail and not a later request
        runner.touch_caches()
    start_time = time.perf_counter()
    first_page = [0, grant.pages] if runner.window_pages else [0]
    if not runner.computes_finite_logits(first_page, 0):
        dtype = tensors.dtype_name(build.ops.dtype)
        raise NotFiniteError(f"{build.path.name}: the logits of the model are not finite numbers in {dtype}")
    return runner, time.perf_counter() - start_time


def _facts(
    build: Build,
    model: Decoder,
    request: MemoryRequest,
    grant: MemoryGrant,
    loaded: Sequence[RankLoaded],
    granted: Sequence[StageGranted],
    token_seconds: float,
    draft: Decoder | None,
) -> ModelFacts:
    devices = max(len(build.options.devices), 1)  # number of devices, each of which has the granted memory
    page = (request.page + request.window_page + sum(stage.page for stage in granted)) * devices
    cache = (request.cache_bytes(grant.pages) + grant.pages * sum(stage.page for stage in granted)) * devices
    window_pages = request.window_pages_of(grant.pages)
    windows = model.windows()
    if draft is not None and not window_pages:
        windows += draft.windows()  # a sequence may release a page only if the draft model does not read it either
    releases = build.ops.skips_pages and not granted and (window_pages or None not in windows)
    state = (request.state + sum(stage.state for stage in granted)) * devices
    if state:
        _log.info("recurrent state reserved sequence_mb=%.1f snapshots=%d", state / 2**20, grant.snapshots)
    return ModelFacts(
        model_type=build.model_type,
        vocab_size=model.vocab_size,
        context_length=min(request.context, grant.pages * PAGE_SIZE),
        parameters=build.parameters,
        weight_bytes=build.total_bytes,
        step_bytes=sum(part.step_bytes for part in loaded),
        token_bytes=page // PAGE_SIZE,
        kv_bytes=cache,
        kv_pages=grant.pages,
        state_bytes=state,
        snapshots=grant.snapshots,
        max_sequences=grant.sequences,
        memory_bytes=grant.total * devices,
        quant=build.policy.quant,
        token_seconds=token_seconds,
        window=max(window for window in windows if window) if releases else None,
        window_pages=window_pages,
    )


def load_reporting(
    connection: socket.socket, model: Path, options: EngineOptions, group: HostGroup | None = None
) -> Runner | None:
    """Load a model, and send progress and the result to the server.

    Returns:
        The runner of the model, or None if loading failed.

    Raises:
        BrokenPipeError, ConnectionResetError: the server has closed the socket.
    """
    reported = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal reported
        # The loader reports each read, which is more often than the server needs.
        if done - reported >= _PROGRESS_STEP or done == total:
            reported = done
            report("weights", done, total)

    def report(stage: str, done: int, total: int) -> None:
        reserved = tensors.cuda.memory_reserved() if options.device.startswith("cuda") else 0
        _send(connection, Progress(stage=stage, done=done, total=total, taken=reserved))

    def ask(request: MemoryRequest) -> MemoryGrant:
        _send(connection, request)
        return receive(connection, MemoryGrant)

    choose_backend(options)
    tensors.set_num_threads(threads_of_rank(options, rank=0))
    try:
        runner = load(model, options, on_progress, ask, group)
        runner.warm_up(lambda done, total: report("graphs", done, total))
    # The server has closed the socket, so no failure can be reported to it.
    except BrokenPipeError:
        raise
    except Exception as error:
        _send(connection, _load_failure(model, error))
        return None
    facts = runner.facts
    _send(
        connection,
        Ready(
            model_type=facts.model_type,
            device=str(runner.device),
            dtype=tensors.dtype_name(runner.ops.dtype),
            kernels=runner.ops.name,
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            kv_pages=facts.kv_pages,
            page_size=PAGE_SIZE,
            weight_bytes=facts.weight_bytes,
            kv_bytes=facts.kv_bytes,
            state_bytes=facts.state_bytes,
            quant=facts.quant,
            memory_bytes=facts.memory_bytes,
            max_sequences=facts.max_sequences,
            images=runner.encoder is not None,
        ),
    )
    return runner


def _load_failure(model: Path, error: Exception) -> LoadFailed:
    if isinstance(error, ModelFileError):
        return LoadFailed(kind="model_file", message=str(error))
    if isinstance(error, DoesNotFitError):
        return LoadFailed(kind="does_not_fit", message=str(error))
    if isinstance(error, DeviceError):
        return LoadFailed(kind="device", message=str(error))
    if is_out_of_memory(error):
        which = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""  # the error may name a rank
        return LoadFailed(
            kind="out_of_memory",
            message=f"{model.name} does not fit into memory{which}; free memory, or load the model "
            "with a smaller quant",
        )
    _log.exception("model not loaded path=%s", quoted(model))
    if isinstance(error, HelexaError):
        return LoadFailed(kind="internal", message=str(error))
    return LoadFailed(
        kind="internal", message=f"loading {model.name} failed: {type(error).__name__}; see the node's log"
    )


def _send(connection: socket.socket, message: FromEngine) -> None:
    connection.sendall(encode(message))
