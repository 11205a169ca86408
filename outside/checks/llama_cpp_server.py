"""Runs llama.cpp's own HTTP server, which the package xllamacpp contains.

usage: llama_cpp_server.py MODEL_FILE MODEL_ID PORT [CHAT_TEMPLATE_FILE]
"""

import signal
import sys
from pathlib import Path

import xllamacpp  # pyright: ignore[reportMissingImports]  # only the program's environment has it

SLOTS = 20
CONTEXT = 1024
"""Tokens of each slot."""


def main() -> None:
    """Serve the model until the process is ended."""
    file, name, port, *templates = sys.argv[1:]
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.model_alias = {name}
    parameters.port = int(port)
    parameters.use_jinja = True
    if templates:
        parameters.chat_template = Path(templates[0]).read_text()
    parameters.n_parallel, parameters.n_ctx = SLOTS, SLOTS * CONTEXT
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)
    print(f"listening on {server.listening_address}", flush=True)
    signal.pause()


main()
