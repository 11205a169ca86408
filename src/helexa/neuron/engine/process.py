"""The engine process: loads one model and serves requests until the socket to the server closes.

The server starts the process with `engine_client.child.Child`.
"""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from helexa.neuron.engine.deferred_modules import IMPORTED_BY_TORCH, defer
from helexa.neuron.engine.ipc.frames import receive
from helexa.neuron.engine.ipc.messages import Load
from helexa.neuron.engine.ranks import cpu_binding
from helexa.neuron.processes import heartbeat, parent_death, stack_traces
from helexa.neuron.processes.file_use import mark_used


def main() -> None:
    """Run an engine process: load the model that the server requests, report the result, and serve requests."""
    gc.disable()  # imported and loaded objects stay alive, and scanning them takes a tenth of the start time
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--pixels-fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when an engine ends
    parent_death.hold()
    heartbeat.attach(arguments.heartbeat_fd)  # before kernels are loaded, because they receive its address
    stack_traces.register()  # before kernels are loaded, because they write native stacks
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
    # Importing torch is slow, so a warm standby process imports it before it receives `Load`.
    from helexa.neuron.engine.load_report import load_reporting
    from helexa.neuron.engine.loop import Engine

    request = receive(connection, Load)
    cpu_binding.bind(request.options, rank=0)
    model = Path(request.model)
    mark_used(model)
    runner = load_reporting(connection, model, request.options, request.group)
    if runner is not None:
        gc.collect()
        gc.freeze()  # a model has many objects, which the collector would scan during steps
        gc.enable()
        Engine(connection, runner, request.options, model, request.step_seconds, pixel_socket).serve()


if __name__ == "__main__":
    main()
