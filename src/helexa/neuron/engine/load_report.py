"""Loads the model in an engine process, and sends progress and the result to the server."""

import logging
import os
import socket
from pathlib import Path

import torch

from helexa.core.errors import DoesNotFitError, HelexaError, ModelFileError
from helexa.neuron.engine.debug_fault import Faults
from helexa.neuron.engine.execution.device_errors import DeviceError, is_out_of_memory
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.frames import encode, receive
from helexa.neuron.engine.ipc.messages import (
    EngineOptions,
    FromEngine,
    HostGroup,
    LoadFailed,
    MemoryGrant,
    MemoryRequest,
    Progress,
    Ready,
)
from helexa.neuron.engine.loading.device import threads_of_rank
from helexa.neuron.engine.loading.load import load
from helexa.neuron.ops.constants import PAGE_SIZE

_log = logging.getLogger("helexa.neuron.engine")
_PROGRESS_STEP = 8 << 20  # bytes between two progress messages


def load_reporting(
    connection: socket.socket, model: Path, options: EngineOptions, group: HostGroup | None = None
) -> Runner | None:
    """Load a model, and send progress and the result to the server.

    The function sends `Progress` messages and memory requests during loading. The last message is `Ready` or
    `LoadFailed`.

    Args:
        group: the other hosts that compute parts of the model; None if this host computes the whole model.

    Returns:
        The runner of the model, or None if loading failed.

    Raises:
        BrokenPipeError, ConnectionResetError: the server has closed the socket.
    """
    reported = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal reported
        faults.loading()
        if done - reported >= _PROGRESS_STEP or done == total:
            reported = done
            report("weights", done, total)

    def report(stage: str, done: int, total: int) -> None:
        reserved = torch.cuda.memory_reserved() if options.device.startswith("cuda") else 0
        _send(connection, Progress(stage=stage, done=done, total=total, taken=reserved))

    def ask(request: MemoryRequest) -> MemoryGrant:
        _send(connection, request)
        return receive(connection, MemoryGrant)

    torch.set_num_threads(threads_of_rank(options, rank=0))
    try:
        faults = Faults.from_environment(model, os.environ)
        runner = load(model, options, on_progress, ask, group)
        faults.afflict(runner)
        runner.warm_up(lambda done, total: report("graphs", done, total))
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
            dtype=str(runner.ops.dtype).removeprefix("torch."),
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
        which = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""  # may name a rank
        return LoadFailed(kind="out_of_memory", message=f"{model.name} does not fit into memory{which}")
    _log.exception("loading %s failed", model)
    if isinstance(error, HelexaError):
        return LoadFailed(kind="internal", message=str(error))
    return LoadFailed(kind="internal", message=f"loading {model.name} failed: {type(error).__name__}")


def _send(connection: socket.socket, message: FromEngine) -> None:
    connection.sendall(encode(message))
