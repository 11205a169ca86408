"""Measure the matrix products of one layer on a GPU, with few and with many rows, as JSON lines.

    python perf/gpu/products.py
    python perf/gpu/products.py --device cpu --tiny

A row is one token. There is one line per matrix, quantization format and number of rows, with the time and a rate. For
few rows, it is the rate at which weights are read, also relative to a copy in torch on the same device. For many rows,
it is the compute rate, also relative to a product in torch. Each measurement uses several matrices in turn, which
together do not fit into any cache.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from gpu_support import timing

if TYPE_CHECKING:
    from helexa.neuron.ops.expert_routing_and_mixture import MixtureOp
    from helexa.neuron.ops.linear_and_norm_operators import LinearOp
    from helexa.neuron.ops.triton.gpu_ops import GpuOps

SHAPES = {
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B o": (4096, 4096),
    "Qwen3-8B gate_up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
    "Qwen3-8B head": (151936, 4096),
}
"""Outputs and columns."""
FORMS = {"W4": "q4k", "W6": "q6k", "W8": "q8_0", "plain": None}
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
EXPERTS = {"Qwen3-30B-A3B": (2048, 768, 128, 8)}
"""Hidden size, expert size, number of experts, and experts per row."""
EXPERT_ROWS = [1, 4, 8, 16, 64, 512, 2048]
TINY_SHAPES, TINY_EXPERTS = {"tiny": (16, 256)}, {"tiny": (32, 32, 4, 2)}
TINY_ROWS = [1, 3, 600]
UNCACHED_BYTES = 400 << 20

Op = TypeVar("Op")


def main() -> None:
    arguments = timing.arguments(__doc__)
    from helexa.neuron.ops.triton.gpu_ops import GpuOps

    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    tiny = arguments.tiny
    copies = timing.copy_bandwidth(device, 1 << 20 if tiny else 1 << 30)
    products = timing.matmul_rate(device, dtype, 64 if tiny else 8192)
    print(json.dumps({"copy_gb_s": round(copies / 1e9, 3), "matmul_tflop_s": round(products / 1e12, 4)}), flush=True)

    def report(took: float, read: float, flops: float, **line: object) -> None:
        line |= {"us": round(took * 1e6, 1), "gb_s": round(read / took / 1e9, 3)}
        line |= {"share_of_copy": round(read / took / copies, 3), "tflop_s": round(flops / took / 1e12, 4)}
        print(json.dumps(line | {"share_of_matmul": round(flops / took / products, 3)}), flush=True)

    uncached = 1 if tiny else UNCACHED_BYTES
    for shape, (outputs, columns) in (TINY_SHAPES if tiny else SHAPES).items():
        for form in FORMS:
            ops = GpuOps(device, dtype)
            linears = until(uncached, ops, partial(linear, ops, form, outputs, columns))
            for rows in TINY_ROWS if tiny else ROWS:
                x = torch.randn(rows, columns, dtype=dtype, device=device)
                took = timing.seconds(lambda: [product(x) for product in linears], device) / len(linears)  # noqa: B023
                read, flops = ops.step_bytes / len(linears), 2 * rows * outputs * columns
                report(took, read, flops, shape=shape, form=form, rows=rows)
            linears.clear()  # free the memory before the next operators are created
    for shape, (hidden, inner, count, chosen) in (TINY_EXPERTS if tiny else EXPERTS).items():
        for form in ("W4", "plain"):
            ops = GpuOps(device, dtype)
            mixtures = until(uncached, ops, partial(mixture, ops, form, hidden, inner, count, chosen))
            for rows in TINY_ROWS[:2] if tiny else EXPERT_ROWS:
                x = torch.randn(rows, hidden, dtype=dtype, device=device)
                scores = torch.randn(rows, count, dtype=dtype, device=device)
                took = timing.seconds(lambda: [op(x, scores) for op in mixtures], device) / len(mixtures)  # noqa: B023
                met = 1 - (1 - chosen / count) ** rows  # expected share of experts that at least one row uses
                read, flops = ops.step_bytes / len(mixtures) * count / chosen * met, 6 * rows * chosen * hidden * inner
                report(took, read, flops, shape=f"{shape} experts", form=form, rows=rows)
            mixtures.clear()


def until(read: int, ops: "GpuOps", make: Callable[[], Op]) -> list[Op]:
    """Return several operators, created by `make`, which together read at least `read` bytes.

    The weights of all these operators do not fit into a cache.
    """
    operators = [make()]
    while ops.step_bytes < read:
        operators.append(make())
    return operators


def linear(ops: "GpuOps", form: str, outputs: int, columns: int) -> "LinearOp":
    return ops.linear([matrix(ops, form, outputs, columns)], None)


def mixture(ops: "GpuOps", form: str, hidden: int, inner: int, count: int, chosen: int) -> "MixtureOp":
    from helexa.neuron.ops.expert_routing_and_mixture import Expert, Routing

    experts = [Expert([matrix(ops, form, 2 * inner, hidden)], matrix(ops, form, hidden, inner)) for _ in range(count)]
    return ops.mixture(experts, Routing(chosen, "normalized"))


def matrix(ops: "GpuOps", form: str, outputs: int, columns: int) -> object:
    from helexa.neuron.weights.quantization_formats import QUANT_FORMATS as FORMATS_AT_LOAD

    weight = torch.randn(outputs, columns, dtype=ops.dtype, device=ops.device)
    name = FORMS[form]
    while name is not None and not FORMATS_AT_LOAD[name].fits(columns):
        name = "q4_1"
    return ops.matrix(weight, None if name is None else FORMATS_AT_LOAD[name])


if __name__ == "__main__":
    main()
