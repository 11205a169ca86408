"""Loads a model: opens its files, requests memory, builds the model, and checks that its logits are finite."""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec
import torch

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.model_facts import ModelFacts
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, MemoryGrant, MemoryRequest
from helexa.neuron.engine.loading.device import kernels_for, policy_for, rank_group, usable_device
from helexa.neuron.engine.loading.fit import divide_free_memory
from helexa.neuron.engine.loading.memory_estimate import estimate_memory
from helexa.neuron.engine.loading.memory_measurement import measured_on_device
from helexa.neuron.engine.loading.memory_request import memory_request, of_all_ranks
from helexa.neuron.engine.ranks.connect import exchange_for
from helexa.neuron.engine.ranks.messages import LoadRank, RankLoaded
from helexa.neuron.engine.ranks.rank_processes import RankProcesses
from helexa.neuron.layers.loader import Loader
from helexa.neuron.models import model_class
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.weights.checkpoint import open_checkpoint

_log = logging.getLogger("helexa.neuron.engine")
_EXCHANGE_SECONDS = 60.0  # time limit of an exchange over gloo; the server's limit for steps is usually shorter


class NotFiniteError(ModelFileError):
    """The logits that a loaded model computes contain NaN or infinity."""


def load(
    model_path: Path,
    options: EngineOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ask: Callable[[MemoryRequest], MemoryGrant] = divide_free_memory,
) -> Runner:
    """Load a model and return its runner.

    If the model computes NaN or infinite logits in the dtype of the options, it is loaded again in float32.

    Args:
        model_path: a model file or folder (see `open_checkpoint`).
        on_progress: called with the bytes read so far and the total bytes while the weights load.
        ask: function that sends a memory request to the server and returns the grant. It is called before weights are
            read. On a GPU, it is called again with measured sizes after the weights are loaded.

    Raises:
        DoesNotFitError: the model needs more memory than is free; the message contains both sizes.
        ModelFileError: the model cannot be loaded; the message says why.
        NotFiniteError: the model computes NaN or infinite logits in float32, too.
        DeviceError: the device cannot be used.
    """
    try:
        return load_once(model_path, options, on_progress, ask)
    except NotFiniteError as error:
        if options.dtype == "float32":
            raise
        _log.warning("%s; it is loaded again in float32", str(error))  # the error itself would keep the model alive
    gc.collect()
    torch.cuda.empty_cache()  # otherwise torch reserves the first model's memory, and the second does not fit
    return load_once(model_path, msgspec.structs.replace(options, dtype="float32"), on_progress, ask)


def load_once(
    model_path: Path,
    options: EngineOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ask: Callable[[MemoryRequest], MemoryGrant] = divide_free_memory,
) -> Runner:
    """Load a model in the dtype of the options, and return its runner.

    `load` describes the arguments and the other errors.

    Raises:
        NotFiniteError: the model computes NaN or infinite logits in this dtype.
    """
    ranks = options.tensor_parallel
    with _Build(model_path, options) as build:
        request = build.request(ranks)
        grant = ask(request)
        others = None if ranks == 1 else RankProcesses(ranks)
        try:
            return _load_rank_0(build, request, grant, others, on_progress, ask)
        except BaseException:
            if others is not None:
                others.close()
            raise


def load_rank(message: LoadRank, on_progress: Callable[[int, int], None]) -> tuple[Decoder, Ops]:
    """Load the part of a model that belongs to a rank after rank 0; return the model and its kernels.

    Args:
        on_progress: called with (bytes read, total bytes) while the weights load.

    Raises:
        ModelFileError: the model cannot be loaded, or this process chose other kernels than rank 0.
    """
    options = message.options
    with _Build(Path(message.model), options, message.rank) as build:
        if build.ops.name != message.kernels:
            raise ModelFileError(f"the kernels are {build.ops.name}, but rank 0 has {message.kernels}")
        return build.model(on_progress), build.ops


class _Build:
    """A checkpoint that is open for loading, with the kernels and the quantization that the model will use."""

    def __init__(self, path: Path, options: EngineOptions, rank: int = 0) -> None:
        self.path = path
        self.options = options
        self.device = usable_device(options.device)
        self.checkpoint = open_checkpoint(path)
        try:
            self.model_type = str(self.checkpoint.config.get("model_type"))
            self.architecture = model_class(self.model_type)
            self._config = {**self.architecture.defaults, **self.checkpoint.config}
            with self._invalid_configuration():
                self.ops = kernels_for(self.device, options, self._config, self.architecture.half)
                self.ops.ranks = rank_group(options, rank, self.device)
                layers = int(self._config.get("num_hidden_layers") or 0)
                self.policy = policy_for(options, self.checkpoint, layers, self.ops)
        except BaseException:
            self.checkpoint.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpoint.close()

    def request(self, ranks: int) -> MemoryRequest:
        """Return the memory request of all ranks together."""
        with self._invalid_configuration():
            estimate = estimate_memory(self.checkpoint, self.architecture, self._config, self.ops, self.policy)
        request = memory_request(of_all_ranks(estimate, ranks), self.options, self.ops)
        processes = (ranks - 1) * request.held  # a process without a model holds about as much as this process now
        return msgspec.structs.replace(request, step=request.step + processes)

    def model(self, on_progress: Callable[[int, int], None]) -> Decoder:
        """Read the weights and return the model."""
        store = self.ops.store(self.path, self.policy.quant)
        total = self.checkpoint.total_bytes
        with self._invalid_configuration():
            loader = Loader(self.checkpoint, self.ops, lambda done: on_progress(done, total), store, self.policy)
            model = self.architecture(self._config, loader)
        if store is not None:
            store.save()
        return model

    @contextmanager
    def _invalid_configuration(self) -> Iterator[None]:
        """Raise a ModelFileError if the configuration has values that a model cannot have."""
        try:
            yield
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{self.path.name}: its configuration is invalid: {error!r}") from error


def _load_other_ranks(build: _Build, others: RankProcesses, on_progress: Callable[[int, int], None]) -> None:
    """Make the other ranks start to load their parts of the model. `RankProcesses.load` describes `on_progress`."""
    options = msgspec.structs.replace(build.options, quant=build.policy.quant)

    def message(rank: int) -> LoadRank:
        return LoadRank(
            model=str(build.path),
            options=options,
            kernels=build.ops.name,
            rank=rank,
            rendezvous=str(others.rendezvous / "store"),
            step_seconds=_EXCHANGE_SECONDS,
        )

    others.load(message, on_progress)


def _load_rank_0(
    build: _Build,
    request: MemoryRequest,
    grant: MemoryGrant,
    others: RankProcesses | None,
    on_progress: Callable[[int, int], None],
    ask: Callable[[MemoryRequest], MemoryGrant],
) -> Runner:
    """Load the part of rank 0, wait until all ranks are connected, and return the runner."""
    options, ops, total = build.options, build.ops, build.checkpoint.total_bytes
    read = [0] * ops.ranks.count

    def on_rank_progress(rank: int, done: int) -> None:
        read[rank] = done
        on_progress(min(sum(read), total), total)

    def on_own_progress(done: int, _: int) -> None:
        if others is not None:
            others.check()
        on_rank_progress(0, done)

    if others is not None:
        _load_other_ranks(build, others, on_rank_progress)
    model = build.model(on_own_progress)
    step_bytes = ops.step_bytes
    if others is not None:
        own = RankLoaded(model.loader.matrix_bytes, step_bytes)
        ranks = [own, *others.wait_until_loaded()]
        for rank, loaded in enumerate(ranks):
            _log.info("rank %d of %d: %.2f MiB of weights", rank, len(ranks), loaded.matrix_bytes / 2**20)
        step_bytes = sum(loaded.step_bytes for loaded in ranks)
        ops.connect(exchange_for(ops, ops.ranks, others.memory_fd, others.rendezvous / "store", _EXCHANGE_SECONDS))
        on_progress(total, total)
    parameters = sum(math.prod(build.checkpoint.shape(name)) for name in build.checkpoint.names())
    if build.device.type == "cuda":
        request = measured_on_device(model, ops, options, request, grant.sequences, lambda: on_progress(total, total))
        grant = ask(request)
    facts = ModelFacts(
        model_type=build.model_type,
        vocab_size=model.vocab_size,
        context_length=min(request.context, grant.pages * PAGE_SIZE),
        parameters=parameters,
        weight_bytes=total,
        step_bytes=step_bytes,
        token_bytes=request.page // PAGE_SIZE,
        kv_bytes=grant.pages * request.page,
        kv_pages=grant.pages,
        state_bytes=request.state,
        snapshots=grant.snapshots,
        max_sequences=grant.sequences,
        memory_bytes=grant.total,
        quant=build.policy.quant,
    )
    if model.recurrent:
        _log.info("recurrent state: %.1f MiB a sequence, room for %d snapshots", request.state / 2**20, grant.snapshots)
    if others is not None:
        others.allocate(request, grant)
    runner = Runner(model, ops, options, request, grant, others)
    if options.kv_cache_mb:  # missing memory shows now, not while serving
        runner.touch_caches()
    start_time = time.perf_counter()
    if not runner.computes_finite_logits(0, 0):
        dtype = str(ops.dtype).removeprefix("torch.")
        raise NotFiniteError(f"{build.path.name}: its logits are not finite numbers in {dtype}")
    runner.facts = replace(facts, token_seconds=time.perf_counter() - start_time)
    return runner
