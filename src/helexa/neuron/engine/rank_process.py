"""Process of a rank other than 0: loads its part, and computes rank 0's steps."""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from helexa.core.errors import HelexaError, ModelFileError
from helexa.core.logs import quoted
from helexa.neuron import tensors
from helexa.neuron.engine.deferred_modules import IMPORTED_BY_TORCH, defer
from helexa.neuron.engine.execution.device_errors import DeviceError, is_device_fault, is_out_of_memory
from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, encode
from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import choose_backend, with_torch_if_required
from helexa.neuron.engine.loading.build import build_rank
from helexa.neuron.engine.ranks import cpu_binding
from helexa.neuron.engine.ranks.messages import (
    FromRank,
    LoadRank,
    RankFailed,
    RankLoaded,
    RankProgress,
    Request,
    ToRank,
)
from helexa.neuron.engine.ranks.rank import Rank
from helexa.neuron.processes import heaps_and_shared_memory, parent_watch, stack_traces_and_exit_reasons

_log = logging.getLogger("helexa.neuron.engine")
_PROGRESS_STEP = 8 << 20  # bytes between two progress messages


def main() -> None:
    """Run the process of one rank until rank 0 ends."""
    defer(IMPORTED_BY_TORCH)
    gc.disable()
    heaps_and_shared_memory.use_one_heap()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True)
    arguments = parser.parse_args()
    prefix = f"%(levelname)s %(name)s: rank {arguments.rank}: "
    logging.basicConfig(level=logging.INFO, format=f"{prefix}%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent_watch.start()
    stack_traces_and_exit_reasons.register()
    code = 0
    try:
        _run(socket.socket(fileno=arguments.fd), arguments.memory_fd)
    except (BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has ended
    except SystemExit as system_exit:
        code = int(system_exit.code or 0)
    except Exception:
        _log.exception(
            "rank process ends after an error rank=%d; the engine ends, too, and is restarted", arguments.rank
        )
        code = 1
    logging.shutdown()
    os._exit(code)  # an orderly exit would wait for the other ranks, and hang if one of them hangs


def _run(connection: socket.socket, memory_fd: int) -> None:
    """Execute the messages of rank 0 until rank 0 ends."""
    decoder = FrameDecoder(ToRank)
    load: LoadRank | None = None
    rank: Rank | None = None
    while data := connection.recv(1 << 20):
        for message in decoder.feed(data):
            if isinstance(message, LoadRank):
                load, rank = message, _load(connection, message, memory_fd)
                continue
            if load is None or rank is None:
                continue  # the load failed, and rank 0 ends this process when it reads the error
            try:
                reply = rank.handle(message)
            except Exception as error:
                # Rank 0 waits for the reply to a request. Other messages have no reply, so the error ends the process.
                if not isinstance(message, Request):
                    raise
                reply = _failure(error, load, message)
            if reply is not None:
                connection.sendall(encode(reply))


def _load(connection: socket.socket, message: LoadRank, memory_fd: int) -> Rank | None:
    """Load the rank's part, and report to rank 0; return None if the load failed."""
    reported = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal reported
        if done - reported >= _PROGRESS_STEP:
            reported = done
            report(RankProgress(done))

    def report(message: FromRank) -> None:
        connection.sendall(encode(message))

    options = message.options
    cpu_binding.bind(options, message.rank)
    choose_backend(options, message.rank)
    tensors.set_num_threads(cpu_binding.threads_of_rank(options, message.rank))
    try:
        model, ops = with_torch_if_required(Path(message.model).name, lambda: build_rank(message, on_progress))
    except BrokenPipeError:
        raise
    except Exception as error:
        report(_failure(error, message, message))
        return None
    heaps_and_shared_memory.trim_heaps()
    report(RankLoaded(model.loader.matrix_bytes, ops.step_bytes))
    return Rank(model, ops, options, memory_fd)


def _failure(error: Exception, load: LoadRank, message: ToRank) -> RankFailed:
    """Return the reply to `message`, which failed on the rank that `load` describes."""
    if isinstance(error, ModelFileError):
        return RankFailed("model_file", str(error))
    if isinstance(error, DeviceError):
        return RankFailed("device", str(error))
    if is_out_of_memory(error):
        return RankFailed("out_of_memory", "out of memory")
    _log.error(
        "rank failed, and rank 0 gets the error rank=%d message=%s path=%s",
        *(load.rank, type(message).__name__, quoted(load.model)),
        exc_info=error,
    )
    if is_device_fault(error):
        return RankFailed("device", str(error).partition("\n")[0])
    return RankFailed("internal", str(error) if isinstance(error, HelexaError) else type(error).__name__)


if __name__ == "__main__":
    main()
