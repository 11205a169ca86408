"""Builds a process's or a host's part of a model from a checkpoint."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.image_encoder import ImageEncoder
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryRequest
from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import kernels_for, usable_device
from helexa.neuron.engine.loading.kv_cache_size_and_memory_request import free_memory, memory_request, of_all_ranks
from helexa.neuron.engine.loading.memory_estimate import estimate_memory
from helexa.neuron.engine.loading.vision import VisionMemory, VisionPart
from helexa.neuron.engine.ranks.messages import LoadRank, RankLoaded, StageLayers
from helexa.neuron.engine.ranks.rank_processes import RankProcesses
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.stage import WHOLE_MODEL, Stage
from helexa.neuron.models import model_class
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.models.settings import SERVED_CONTEXT
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.rank_group_and_shares import RankGroup
from helexa.neuron.tensors import Device
from helexa.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from helexa.neuron.weights.quantization_formats import AUTO, QuantPolicy, automatic, quant_named

_log = logging.getLogger("helexa.neuron.engine")
# Time limit of an exchange over gloo or NCCL, by type of device. The server's limit for steps is usually shorter.
_EXCHANGE_SECONDS = {"cpu": 60.0, "cuda": 600.0}
_LAYER = "model.layers."
_MAX_PROCESS_BYTES = 512 << 20  # maximum memory of another rank's process without its model


class Build:
    """An open checkpoint, with the kernels and quantization of the model to build.

    The caller must use the object in a `with` statement, which closes the files.

    Args:
        path: a model file or folder (see `open_checkpoint`).
        rank: number of this process among the ranks of this host.

    Raises:
        DeviceError, ModelFileError: the device or the model cannot be used.
    """

    def __init__(self, path: Path, options: EngineOptions, rank: int = 0) -> None:
        self.path = path
        self.options = options
        # The decoder layers to build. The caller may set them before `request` and `model`.
        self.stage: Stage = WHOLE_MODEL
        self.device = usable_device(options.device_of(rank))
        self.checkpoint = self.open(path)
        try:
            self.model_type = str(self.checkpoint.config.get("model_type"))
            self.architecture = self.architecture_of(self.model_type)
            with self._invalid_configuration():
                self.config = self.architecture.standard_config(self.checkpoint.config)
                if options.context_length:
                    self.config[SERVED_CONTEXT] = options.context_length
                self.ops = kernels_for(
                    self.device, options, self.config, self.architecture.half, self.architecture.sinks
                )
                self.ops.ranks = _rank_group(options, rank, self.device)
                self.layers = int(self.config.get("num_hidden_layers") or 0)
                self.policy = _quant_policy(options, self.checkpoint, self.layers, self.ops)
                # Only rank 0 encodes images, because the other ranks receive the embeddings with the step.
                self.vision = None
                if options.images and rank == 0:
                    self.vision = VisionPart.open(path, self.ops, self.policy.quant, options)
        except BaseException:
            self.checkpoint.close()
            raise

    def open(self, path: Path) -> Checkpoint:
        """Open the checkpoint at `path`."""
        return open_checkpoint(path)

    def architecture_of(self, model_type: str) -> type[Decoder]:
        """Return the class that implements the architecture `model_type`."""
        return model_class(model_type)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpoint.close()
        if self.vision is not None:
            self.vision.close()

    @property
    def final_options(self) -> EngineOptions:
        """Options for the other processes, with the quantization that this process chose."""
        # With `quant = "auto"`, each process would choose a format from its own free memory.
        return msgspec.structs.replace(self.options, quant=self.policy.quant)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(math.prod(self.checkpoint.shape(name)) for name in self.checkpoint.names())

    def sizes(self) -> tuple[list[int], int]:
        """Return the file bytes of each decoder layer, and of all other tensors."""
        layers, rest = [0] * self.layers, 0
        for name in self.checkpoint.names():
            size = self.checkpoint.on_meta(name, self.checkpoint.shape(name)).nbytes
            index = name.removeprefix(_LAYER).partition(".")[0] if name.startswith(_LAYER) else ""
            if index.isdecimal() and int(index) < self.layers:
                layers[int(index)] += size
            else:
                rest += size
        return layers, rest

    def request(self) -> MemoryRequest:
        """Return the memory request: of each of `options.devices`, or else of all ranks."""
        with self._invalid_configuration():
            estimate = estimate_memory(
                self.checkpoint, self.architecture, self.config, self.ops, self.policy, self.stage
            )
            # A stage has no window pages: their number depends on the number of KV pages, which the other hosts may
            # still reduce. Its layers with a sliding window use KV pages.
            if not self.stage.is_whole_model:
                estimate = dataclasses.replace(estimate, window_page=0)
            vision = self.vision_memory()
        # An image that must be computed in one step may exceed the token budget.
        step_tokens = self.options.max_step_tokens + vision.image_rows
        options = msgspec.structs.replace(self.options, max_step_tokens=step_tokens)
        processes = 0
        if self.options.devices:  # the request of rank 0 applies to each device, because rank 0 has the largest part
            request = memory_request(estimate, options, self.ops)
        else:
            ranks = self.ops.ranks.count
            request = memory_request(of_all_ranks(estimate, ranks), options, self.ops)
            # Without its model, another rank's process needs about as much memory as this process now has, or less if
            # this process also has other objects.
            processes = (ranks - 1) * min(request.held, _MAX_PROCESS_BYTES)
        return msgspec.structs.replace(
            request,
            weights=request.weights + vision.weights,
            step=request.step + processes + vision.step,
            image_rows=vision.image_rows,
        )

    @property
    def total_bytes(self) -> int:
        """Total size of the model's tensors in the files, in bytes, with the vision part."""
        return self.checkpoint.total_bytes + (0 if self.vision is None else self.vision.total_bytes)

    def vision_memory(self) -> VisionMemory:
        """Return the memory of the vision tower; zeros without a vision tower."""
        return VisionMemory(0, 0, 0) if self.vision is None else self.vision.memory()

    def encoder(self, model: Decoder) -> ImageEncoder | None:
        """Load the vision tower, and return its image encoder; None without a tower."""
        if self.vision is None:
            return None
        with self._invalid_configuration():
            return self.vision.load(model)

    def model(self, on_progress: Callable[[int, int], None]) -> Decoder:
        """Read the weights and return the model.

        Args:
            on_progress: called with (bytes read, total bytes) while the weights load.
        """
        store = self.ops.store(self.path, self.policy.quant, self.part())
        total = self.checkpoint.total_bytes
        with self._invalid_configuration():
            loader = Loader(
                self.checkpoint, self.ops, lambda done: on_progress(done, total), store, self.policy, self.stage
            )
            model = self.build(self.config, loader)
        store.finish(loader.looked_up)
        return model

    def build(self, config: dict[str, Any], loader: Loader) -> Decoder:
        """Return the model, with the weights that `loader` reads."""
        return self.architecture(config, loader)

    def part(self) -> str:
        """Return the name of this process's part of the model; empty for the whole."""
        ranks, names = self.ops.ranks, []
        if ranks.count > 1:
            names.append(f"rank {ranks.rank} of {ranks.count}{' sums' if ranks.adds_results else ''}")
        if not self.stage.is_whole_model:
            own = self.stage.layers(self.layers)
            names.append(f"layers {own.start} to {own.stop - 1}")
        return " ".join(names)

    @contextmanager
    def _invalid_configuration(self) -> Iterator[None]:
        """Context that converts errors from an invalid configuration to ModelFileErrors."""
        try:
            yield
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{self.path.name}: the model's configuration is invalid: {error!r}") from error


def _quant_policy(options: EngineOptions, checkpoint: Checkpoint, layers: int, ops: Ops) -> QuantPolicy:
    """Return which weights are quantized while a model with `layers` layers loads."""
    quant = quant_named(options.quant) if options.quant else ""
    # `auto` needs the free memory, so it is decided here and not when options are read.
    if quant == AUTO:
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
        free_bytes = free_memory(ops.device, options)
        free_bytes = min(free_bytes, options.memory_limit_mb * 2**20 or free_bytes) * max(len(options.devices), 1)
        quant = automatic(shapes, layers, checkpoint.total_bytes, free_bytes) if ops.quantized else ""
        _log.info("quant chosen quant=%s free_mb=%d", quant or "none", free_bytes >> 20)
    policy = QuantPolicy(quant, layers)
    if policy.quant and not ops.quantized:
        _log.warning(
            "quantized weights save no memory with these kernels quant=%s dtype=%s kernels=%s; leave quant out",
            *(policy.quant, ops.dtype, ops.name),
        )
    return policy


def _rank_group(options: EngineOptions, rank: int, device: Device) -> RankGroup:
    """Return a rank's number, the number of ranks, and whether the ranks add results."""
    mode = options.tensor_parallel_mode
    adds_results = mode == "sum" or (mode == "auto" and device.type == "cuda")
    return RankGroup(rank, options.tensor_parallel, adds_results and options.tensor_parallel > 1)


def build_rank(message: LoadRank, on_progress: Callable[[int, int], None]) -> tuple[Decoder, Ops]:
    """Load the part of a rank other than rank 0; return the model and its kernels.

    Args:
        on_progress: called with (bytes read, total bytes) while the weights load.

    Raises:
        ModelFileError: the model cannot be loaded, or this process chose other kernels than rank 0.
    """
    options = message.options
    with Build(Path(message.model), options, message.rank) as build:
        if build.ops.name != message.kernels:
            raise ModelFileError(
                f"rank {message.rank} computes with the kernels {build.ops.name}, but rank 0 with {message.kernels}",
                advice="load the model again",
            )
        if message.layers is not None:
            build.stage = Stage(range(message.layers.start, message.layers.stop))
        return build.model(on_progress), build.ops


def build_part(
    build: Build,
    other_ranks: RankProcesses | None,
    on_progress: Callable[[int], None],
) -> tuple[Decoder, list[RankLoaded]]:
    """Load the part of rank 0 while other ranks load theirs, and connect the ranks.

    Args:
        other_ranks: the processes of the other ranks; None if this host has one rank.
        on_progress: called with the bytes of the model that the ranks of this host have read.

    Returns:
        The model of rank 0, and the sizes of all ranks.
    """
    ops = build.ops
    read = [0] * ops.ranks.count

    def on_rank_progress(rank: int, done: int) -> None:
        read[rank] = done
        on_progress(sum(read))

    def on_own_progress(done: int, total: int) -> None:
        if other_ranks is not None:
            # This check finds a failed rank before rank 0 has read all of its weights.
            other_ranks.check()
        on_rank_progress(0, done)

    if other_ranks is not None:
        _load_other_ranks(build, other_ranks, on_rank_progress)
    model = build.model(on_own_progress)
    loaded = [RankLoaded(model.loader.matrix_bytes, ops.step_bytes)]
    if other_ranks is not None:
        loaded += other_ranks.wait_until_loaded()
        for rank, sizes in enumerate(loaded):
            _log.info("weights loaded rank=%d ranks=%d weights_mb=%.2f", rank, len(loaded), sizes.matrix_bytes / 2**20)
        other_ranks.connect(ops, _EXCHANGE_SECONDS[build.device.type])
    return model, loaded


def _load_other_ranks(build: Build, other_ranks: RankProcesses, on_progress: Callable[[int, int], None]) -> None:
    """Make the other ranks start to load their parts of the model."""
    own = build.stage.layers(build.layers)
    layers = None if build.stage.is_whole_model else StageLayers(own.start, own.stop)

    def message(rank: int) -> LoadRank:
        return LoadRank(
            model=str(build.path),
            options=build.final_options,
            kernels=build.ops.name,
            rank=rank,
            layers=layers,
        )

    other_ranks.load(message, on_progress)
