"""Measures times on a GPU, and the GPU's rates of copying memory and of matrix products, for comparison."""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from helexa.neuron.ops.batch import Batch

_TRIES = 20
_CYCLES = 5e9  # GPU clock cycles to sleep per second of host time: more than twice the clock rate of any GPU


def arguments(
    description: str | None, add: Callable[[argparse.ArgumentParser], object] = lambda parser: None
) -> argparse.Namespace:
    """Parse the command line options that all GPU scripts share.

    Args:
        description: help text of the script.
        add: function that adds the script's own options to the parser.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that the script works")
    add(parser)
    parsed = parser.parse_args()
    if parsed.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        parsed.dtype = "float16"  # Triton's interpreter computes products of bfloat16 wrongly
    if parsed.device.startswith("cuda:"):
        torch.cuda.set_device(parsed.device)  # Triton launches kernels on the current device
    return parsed


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median duration of `call` on the device in seconds, without the host's time to launch kernels."""

    def host_seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    if device.type != "cuda":
        return host_seconds()
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    ahead = int(host_seconds() * _CYCLES)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_TRIES)]
    for begin, end in marks:
        torch.cuda._sleep(ahead)  # meanwhile the host launches all kernels, so that the device need not wait
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Return the measured memory bandwidth of a copy on the device, in bytes read and written per second."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Return the measured rate of a large matrix product, in floating-point operations per second."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, device)


def batch(prefixes: list[int], rows: int, pages: list[list[int]], device: torch.device) -> "Batch":
    """Return a batch of sequences as the input of one layer's kernels. Sequence i has the state slot i.

    Args:
        prefixes: number of tokens of each sequence that are already in the KV cache.
        rows: number of new tokens of each sequence.
        pages: KV pages of each sequence.
        device: device of the batch.
    """
    from helexa.neuron.engine.step_input_and_graph_sizes import StepBuffers, StepInput, int32
    from helexa.neuron.ops.batch import Capacity

    count, none = len(prefixes), int32([0] * len(prefixes) * rows)
    step = StepInput(
        tokens=none,
        positions=none,
        slots=none,
        sample_rows=none[:0],
        starts=int32(range(0, (count + 1) * rows, rows)),
        prefixes=int32(prefixes),
        settled=int32([rows] * count),
        state_slots=int32(range(count)),
        pages=int32(pages),
    )
    return StepBuffers(Capacity(count * rows, count, len(pages[0])), device, packed=True).load(step)
