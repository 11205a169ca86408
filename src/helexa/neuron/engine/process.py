"""The engine process: loads one model, and serves until its socket closes."""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from helexa.neuron.engine.deferred_modules import IMPORTED_BY_TORCH, defer
from helexa.neuron.processes import heaps_and_shared_memory, heartbeat, parent_watch, stack_traces_and_exit_reasons
from helexa.neuron.processes.file_locks_and_threads import mark_used


def main() -> None:
    """Run an engine process: load the requested model, report, and serve."""
    gc.disable()  # imported and loaded objects stay alive, and scanning them takes a tenth of the start time
    heaps_and_shared_memory.use_one_heap()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--pixels-fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when an engine ends
    parent_watch.start()
    heartbeat.attach(arguments.heartbeat_fd)  # before kernels are loaded, which receive the counter's address
    stack_traces_and_exit_reasons.register()  # before kernels are loaded, so that they write native stacks
    code = 0
    try:
        _run(socket.socket(fileno=arguments.fd), socket.socket(fileno=arguments.pixels_fd))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has ended
    except SystemExit as system_exit:
        code = int(system_exit.code or 0)
    logging.shutdown()
    os._exit(code)  # an orderly teardown is slow, and hangs on a broken device


def _run(connection: socket.socket, pixel_socket: socket.socket) -> None:
    defer(IMPORTED_BY_TORCH)
    # Imports are slow, so a warm standby process imports before it receives `Load`. At the top of the file, the imports
    # would run before `main` disables the garbage collector.
    from helexa.neuron.engine.ipc.message_and_pixel_sockets import receive
    from helexa.neuron.engine.ipc.messages import Load
    from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import import_torch_for_gpu
    from helexa.neuron.engine.loading.load import load_reporting
    from helexa.neuron.engine.loop import Engine
    from helexa.neuron.engine.ranks import cpu_binding

    import_torch_for_gpu()
    gc.freeze()  # imported objects stay alive, so collections during the load need not scan them
    request = receive(connection, Load)
    cpu_binding.bind(request.options, rank=0)
    model = Path(request.model)
    mark_used(model)
    if request.options.draft_model:
        mark_used(Path(request.options.draft_model))
    runner = load_reporting(connection, model, request.options, request.group)
    if runner is not None:
        heaps_and_shared_memory.trim_heaps()  # unpacking a GGUF file's weights can leave 100 MiB of free heap
        gc.freeze()  # a model has many objects, which the collector would scan during steps
        gc.enable()
        Engine(connection, runner, request.options, model, request.step_seconds, pixel_socket).serve()


if __name__ == "__main__":
    main()
