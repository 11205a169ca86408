"""The engine process: one loaded model, one scheduler, one loop. Started as a `Child`, ends with its socket."""

import argparse
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from helexa.neuron.engine.ipc.frames import receive
from helexa.neuron.engine.ipc.messages import Load
from helexa.neuron.processes import heartbeat, parent_death
from helexa.neuron.processes.file_use import mark_used


def main() -> None:
    """Load the model that the server names, say `Ready` (or `LoadFailed`), serve."""
    gc.disable()  # what is imported and loaded is there to stay, and looking through it takes a tenth of the start
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when an engine ends
    parent_death.hold()
    heartbeat.attach(arguments.heartbeat_fd)  # before kernels are loaded, which are given its address
    faulthandler.register(signal.SIGUSR1)  # the server wants to know where a process hangs
    code = 0
    try:
        _run(socket.socket(fileno=arguments.fd))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server is gone, and so are we
    except SystemExit as end:
        code = int(end.code or 0)
    logging.shutdown()
    os._exit(code)  # taking everything down in order takes long, and for ever on a device that is broken


def _run(connection: socket.socket) -> None:
    # Torch takes long to import, and a server that starts an engine ahead has not decided yet what it is for.
    from helexa.neuron.engine.load_report import load_reporting
    from helexa.neuron.engine.loop import Engine

    asked = receive(connection, Load)
    model = Path(asked.model)
    mark_used(model)
    runner = load_reporting(connection, model, asked.options)
    if runner is not None:
        gc.collect()
        gc.freeze()  # a model is many objects, none of which the collector need look through in the midst of steps
        gc.enable()
        Engine(connection, runner, asked.options, model, asked.step_seconds).serve()


if __name__ == "__main__":
    main()
