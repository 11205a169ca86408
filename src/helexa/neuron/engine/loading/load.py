"""Loads a model: opens its files, requests memory, builds the model, and checks that its logits are finite."""

import gc
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.model_facts import ModelFacts
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, MemoryGrant, MemoryRequest
from helexa.neuron.engine.loading.device import kernels_for, policy_for, usable_device
from helexa.neuron.engine.loading.fit import divide_free_memory
from helexa.neuron.engine.loading.memory_estimate import estimate_memory
from helexa.neuron.engine.loading.memory_measurement import measured_on_device
from helexa.neuron.engine.loading.memory_request import memory_request
from helexa.neuron.layers.loader import Loader
from helexa.neuron.models import model_class
from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.weights.checkpoint import open_checkpoint

_log = logging.getLogger("helexa.neuron.engine")


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
    device = usable_device(options.device)
    with open_checkpoint(model_path) as checkpoint:
        model_type = str(checkpoint.config.get("model_type"))
        architecture = model_class(model_type)
        config = {**architecture.defaults, **checkpoint.config}
        try:
            ops = kernels_for(device, options, config, architecture.half)
            policy = policy_for(options, checkpoint, int(config.get("num_hidden_layers") or 0), ops)
            request = memory_request(estimate_memory(checkpoint, architecture, config, ops, policy), options, ops)
            grant = ask(request)
            store = ops.store(model_path, policy.quant)

            def on_read(done: int) -> None:
                on_progress(done, checkpoint.total_bytes)

            model = architecture(config, Loader(checkpoint, ops, on_read, store, policy))
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{model_path.name}: its configuration is invalid: {error!r}") from error
        if store is not None:
            store.save()
        weight_bytes = checkpoint.total_bytes
        parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    if device.type == "cuda":
        request = measured_on_device(
            model, ops, options, request, grant.sequences, lambda: on_progress(weight_bytes, weight_bytes)
        )
        grant = ask(request)
    facts = ModelFacts(
        model_type=model_type,
        vocab_size=model.vocab_size,
        context_length=min(request.context, grant.pages * PAGE_SIZE),
        parameters=parameters,
        weight_bytes=weight_bytes,
        step_bytes=ops.step_bytes,
        token_bytes=request.page // PAGE_SIZE,
        kv_bytes=grant.pages * request.page,
        kv_pages=grant.pages,
        state_bytes=request.state,
        snapshots=grant.snapshots,
        max_sequences=grant.sequences,
        memory_bytes=grant.total,
        quant=policy.quant,
    )
    if model.recurrent:
        _log.info("recurrent state: %.1f MiB a sequence, room for %d snapshots", request.state / 2**20, grant.snapshots)
    runner = Runner(model, ops, options, request, grant)
    if options.kv_cache_mb:  # missing memory shows now, not while serving
        runner.touch_caches()
    start_time = time.perf_counter()
    if not runner.computes_finite_logits(0, 0):
        dtype = str(ops.dtype).removeprefix("torch.")
        raise NotFiniteError(f"{model_path.name}: its logits are not finite numbers in {dtype}")
    runner.facts = replace(facts, token_seconds=time.perf_counter() - start_time)
    return runner
