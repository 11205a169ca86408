"""Chooses the backend (numpy or torch), and tests device and kernels for it."""

import gc
import importlib
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from helexa.core.errors import ModelFileError, not_installed
from helexa.core.logs import quoted
from helexa.neuron import tensors
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import MIXED
from helexa.neuron.ops.kernel_selection import select_kernels
from helexa.neuron.ops.native.compilation import why_unavailable
from helexa.neuron.tensors import Device

_log = logging.getLogger("helexa.neuron.engine")
_T = TypeVar("_T")
_SHORT_CONTEXT = 8192
_LARGEST_8_BIT_HEAD = 128


def choose_backend(options: EngineOptions, rank: int = 0) -> None:
    """Choose numpy if native kernels allow `options` or torch is missing; else torch."""
    native = (
        options.device_of(rank).partition(":")[0] == "cpu"
        and options.kernels == "auto"
        and options.dtype in ("auto", "bfloat16")
        and why_unavailable() is None
    )
    # If options need torch, and torch is not installed, `kernels_for` raises an error that says so.
    tensors.use("numpy" if native or not tensors.torch_is_installed() else "torch")


def import_torch_for_gpu() -> None:
    """Import torch now if this machine has a GPU, because a load will probably use it."""
    if sys.platform == "darwin" or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists():
        with suppress(ImportError, OSError):  # a load that uses torch reports the error
            importlib.import_module("torch")


def with_torch_if_required(name: str, load: Callable[[], _T]) -> _T:
    """Call `load`; if it raises `TorchRequired`, switch to torch and call it again.

    Args:
        name: name of the model, for the error message and the log.

    Returns:
        The result of `load`.

    Raises:
        ModelFileError: the model requires torch, and torch is not installed.
    """
    try:
        return load()
    except tensors.TorchRequired as error:
        reason = str(error)
    if not tensors.torch_is_installed():
        raise ModelFileError(
            f"{name}: the native kernels do not support this model ({reason}), and {not_installed('torch', 'gpu')}",
            advice="",
        )
    _log.info("model is loaded with torch model=%s reason=%s", quoted(name), quoted(reason))
    gc.collect()  # free the tensors to which the tracebacks of the failed load refer
    threads = tensors.get_num_threads()
    tensors.use("torch")
    tensors.set_num_threads(threads)
    return load()


def usable_device(name: str) -> Device:
    """Return the device `name` after a test. A CUDA device becomes the current device.

    Raises:
        DeviceError: the device cannot be used; the message says why.
    """
    try:
        device = tensors.device(name)
        placed = tensors.zeros(1, device=device).device  # runs a kernel; some torch builds lack a device's kernels
        if device.type == "cuda":
            device = placed  # torch requires an index, which the name `cuda` lacks
            tensors.cuda.set_device(device)  # kernels launch on the current device
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # torch appends a list of device types
        raise DeviceError(f"device '{name}' cannot be used: {reason}; choose another device, such as cpu") from error
    return device


def kernels_for(device: Device, options: EngineOptions, config: dict[str, Any], half: bool, sinks: bool = False) -> Ops:
    """Return the kernels for a device, options and a model (see `select_kernels`).

    Args:
        half: whether the model's activations stay within the range of float16.
        sinks: whether the attention heads have attention sinks.
    """
    kv_bits = {"auto": _automatic_kv_bits(options, config, sinks), "int8": 8, "unquantized": 16}[options.kv_dtype]
    x_bits = {"auto": MIXED, "int16": 16, "int8": 8}[options.activations]
    choice = select_kernels(
        device,
        None if options.dtype == "auto" else getattr(tensors, options.dtype),
        config,
        kv_bits=kv_bits,
        x_bits=x_bits,
        half=half,
        kernels=options.kernels,
    )
    _log.info("kernels chosen kernels=%s reason=%s", choice.ops.name, quoted(choice.reason))
    if options.kv_dtype == "int8" and choice.ops.kv_bits != 8:
        fields = (choice.ops.name, choice.ops.dtype)
        _log.warning(
            "kv_dtype int8 ignored, because only native and GPU kernels support int8 kernels=%s dtype=%s; the KV cache "
            "has this dtype and needs more memory",
            *fields,
        )
    return choice.ops


def _automatic_kv_bits(options: EngineOptions, config: dict[str, Any], sinks: bool) -> int | None:
    """Return 16 bits where 8 would cost too much accuracy or save little, else None."""
    heads, hidden = config.get("num_attention_heads") or 1, config.get("hidden_size") or 0
    # All 8-bit numbers of a head share one scale. For heads of 256 numbers (gemma-3-270m), the divergence from float32
    # is four times as large with 8 bits as with 16 (docs/benchmark-results.md).
    if (config.get("head_dim") or hidden // heads) > _LARGEST_8_BIT_HEAD:
        return 16
    # For gpt-oss, all public measurements of rounded keys are bad: with FP8, a GPQA score of 0.66 instead of 0.71 (pull
    # request 9783 of SGLang), and with llama.cpp's q8_0 another best token at every fourth position.
    if sinks:
        return 16
    trained = config.get("max_position_embeddings")
    context = min(filter(None, (options.context_length, trained)), default=0)
    # In a short context, attention takes a small share of a step, so 8 bits would save little and round every answer.
    return 16 if 0 < context <= _SHORT_CONTEXT else None
