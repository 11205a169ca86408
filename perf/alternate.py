"""Compare the processor time of helexa's steps with that of llama.cpp's steps, in turn in one process.

usage: python perf/alternate.py MODEL --llama-cpp PYTHON [--rows decode@1,decode@8,prefill@512] [--seconds 10]

MODEL is a GGUF file, for example from `random_gguf.py`. PYTHON is a Python interpreter of the same version that has
llama-cpp-python. Both engines compute with one thread. The script measures processor time, so other programs on the
machine disturb the comparison less than that of `compare.py`. In a decode row, the engines compute one step each in
turn, for about `--seconds` seconds. In a prefill row, they compute up to three prompts each in turn. helexa computes
without AMX, which llama.cpp may use. The output has a JSON line for each row:

    helexa, llama.cpp    tokens per second of processor time, of the median step or prompt
    ratio                helexa's rate divided by llama.cpp's rate
    best_ratio           the same for the fastest step or prompt of each engine
    count                number of steps or prompts of each engine
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from engine import Engine  # first, because it sets the environment of an engine process
from support.output import print_line
from support.rows import DECODE_STEPS, Row, parse_rows, parser

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.ops.native.kernel_library import native_kernels

_LEAST_STEPS, _PROMPTS = 5, 3


def load_llama_cpp(python: str, model: str, rows: list[Row]) -> Any:
    """Return the `Model` of `peer_llama_cpp`, with the llama.cpp of the interpreter `python`."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    sys.path += [packages, str(Path(__file__).parent / "peers")]
    stderr = os.dup(2)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)  # llama.cpp writes hundreds of lines
        try:
            from peer_llama_cpp import Model  # pyright: ignore[reportMissingImports]  # the folder is added above

            return Model(model, rows, threads=1)
        finally:
            os.dup2(stderr, 2)


def processor_seconds(run: Callable[[], None]) -> float:
    """Return the processor time of this process while `run` runs."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def alternate(row: Row, engines: tuple[Any, Any], seconds: float) -> tuple[list[float], list[float]]:
    """Run steps or prompts of both engines in turn, and return the processor seconds of each."""
    values: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    if not row.sequences:
        while len(values[0]) < _PROMPTS and (not values[0] or time.perf_counter() - begin < seconds):
            for engine, own in zip(engines, values, strict=True):
                own.append(processor_seconds(engine.parts(row)[0]))
        return values
    parts = [engine.parts(row) for engine in engines]
    for run_prompts, _ in parts:
        run_prompts()
    begin = time.perf_counter()
    while len(values[0]) < _LEAST_STEPS or (len(values[0]) < DECODE_STEPS and time.perf_counter() - begin < seconds):
        for (_, run_step), own in zip(parts, values, strict=True):
            own.append(processor_seconds(run_step))
    return values


def main() -> None:
    command = parser(__doc__)
    command.set_defaults(rows=parse_rows("decode@1,decode@8,prefill@512"), threads=1)
    command.add_argument("--llama-cpp", required=True, metavar="PYTHON")
    command.add_argument("--seconds", type=float, default=10.0)
    arguments = command.parse_args()
    if arguments.threads != 1:
        raise SystemExit("--threads must be 1, because llama.cpp's threads wait for each other in a loop")
    options = EngineOptions(threads=1, speculation=False, max_prefill_beside_decode=0)
    ours = Engine(arguments.model, options)
    # llama.cpp sets the sizes of AMX's registers once for each thread, so another user of them in the thread breaks it.
    native_kernels().use_amx(False)
    engines = (ours, load_llama_cpp(arguments.llama_cpp, arguments.model, arguments.rows))
    for row in arguments.rows:
        helexa, peer = alternate(row, engines, arguments.seconds)
        tokens = row.sequences or row.context
        print_line(
            row=row.name,
            helexa=round(tokens / median(helexa), 1),
            **{"llama.cpp": round(tokens / median(peer), 1)},
            ratio=round(median(peer) / median(helexa), 2),
            best_ratio=round(min(peer) / min(helexa), 2),
            count=len(helexa),
        )
    ours.close()


if __name__ == "__main__":
    main()
