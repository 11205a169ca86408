"""Measure the attention kernels of one layer on a GPU, in decode and in prefill, as JSON lines.

    python perf/gpu/attention.py
    python perf/gpu/attention.py --device cpu --tiny

For decode, a line has the rate at which the kernel reads K and V, and this rate relative to a copy in torch on the same
device. For prefill, a line has the compute rate, and this rate relative to a large matrix product in torch.
"""

import json
from typing import TYPE_CHECKING

import torch
from gpu_support import timing

if TYPE_CHECKING:
    from helexa.neuron.ops.batch import Batch

SHAPES = {"Qwen3-8B": (32, 8, 128), "Qwen3.5-27B": (24, 4, 256), "Qwen3-30B-A3B": (32, 4, 128)}
"""Query heads, KV heads and head dimension."""
DECODES = [(1, 1024), (1, 32768), (16, 4096), (64, 1024)]
"""Number of sequences, and positions of each sequence."""
PROMPTS = [(0, 8192), (24576, 8192)]
"""Positions before the prompt, and rows of the prompt."""
TINY = {"tiny": (4, 2, 32)}


def main() -> None:
    arguments = timing.arguments(__doc__)
    from helexa.neuron.ops.batch import AttentionKind
    from helexa.neuron.ops.kernel_header import PAGE_SIZE
    from helexa.neuron.ops.triton.gpu_ops import GpuOps

    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    tiny = arguments.tiny
    copies = timing.copy_bandwidth(device, 1 << 20 if tiny else 1 << 30)
    products = timing.matmul_rate(device, dtype, 64 if tiny else 8192)
    print(json.dumps({"copy_gb_s": round(copies / 1e9, 3), "matmul_tflop_s": round(products / 1e12, 4)}), flush=True)
    for name, (heads, kv_heads, dim) in (TINY if tiny else SHAPES).items():
        kind = AttentionKind(dim**-0.5)
        for kv_bits in (16, 8):
            ops = GpuOps(device, dtype, kv_bits)
            spans = [(length - 1, 1, count) for count, length in ([(2, 300)] if tiny else DECODES)]
            spans += [(prefix, rows, 1) for prefix, rows in ([(70, 40)] if tiny else PROMPTS)]
            for prefix, rows, count in spans:
                pages = -(-(prefix + rows) // PAGE_SIZE)
                cache = ops.new_cache(kv_heads, count * pages, dim)
                queries = torch.randn(count * rows, heads, dim, dtype=dtype, device=device)
                step = batch(count, prefix, rows, pages, device)
                took = timing.seconds(lambda: ops.attend(queries, cache, step, kind), device)  # noqa: B023
                line: dict[str, object] = {"shape": name, "kv_bits": kv_bits, "prefix": prefix, "rows": rows}
                line |= {"sequences": count, "us": round(took * 1e6, 1)}
                if rows == 1:
                    rate = count * (prefix + 1) * ops.page_bytes(kv_heads, dim) / PAGE_SIZE / took
                    line |= {"gb_s": round(rate / 1e9, 3), "share_of_copy": round(rate / copies, 3)}
                else:
                    rate = 4 * heads * dim * rows * (prefix + rows / 2) / took
                    line |= {"tflop_s": round(rate / 1e12, 4), "share_of_matmul": round(rate / products, 3)}
                print(json.dumps(line), flush=True)


def batch(count: int, prefix: int, rows: int, pages: int, device: torch.device) -> "Batch":
    """Return a batch of equal sequences whose KV pages are in random order.

    Args:
        count: number of sequences.
        prefix: number of tokens of each sequence that are already in the KV cache.
        rows: number of new tokens of each sequence.
        pages: number of KV pages of each sequence.
        device: device of the batch.
    """
    numbers = torch.randperm(count * pages).view(count, pages).tolist()
    return timing.batch([prefix] * count, rows, numbers, device)


if __name__ == "__main__":
    main()
