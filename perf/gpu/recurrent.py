"""Measure the gated delta rule (the operation of a recurrent layer) and token sampling on a GPU, as JSON lines.

    python perf/gpu/recurrent.py
    python perf/gpu/recurrent.py --device cpu --tiny

A line has the time, the rate of memory accesses, and this rate relative to a copy in torch on the same device. A decode
step reads and writes the recurrent state of every sequence. Sampling reads the logits once or several times.
"""

import json

import numpy as np
import torch
from gpu_support import timing

QWEN = (16, 48, 128, 128, 4)  # Qwen3.5-27B: key heads, value heads, their widths, tokens in the convolution
TINY = (1, 2, 16, 16, 4)
DECODES = (1, 16, 64)
PROMPTS = (512, 2048, 8192)
VOCABULARY = 248320
CUTS = {"greedy": (0, 0, 1, 0), "plain": (1, 0, 1, 0), "top-k and top-p": (0.7, 20, 0.95, 0), "top-p": (1, 0, 0.95, 0)}


def main() -> None:
    arguments = timing.arguments(__doc__)
    from helexa.neuron.ops.gated_delta import DeltaSizes, DeltaWeights
    from helexa.neuron.ops.sampling import Sampling
    from helexa.neuron.ops.triton.gpu_ops import GpuOps

    device, dtype, tiny = torch.device(arguments.device), getattr(torch, arguments.dtype), arguments.tiny
    copies = timing.copy_bandwidth(device, 1 << 20 if tiny else 1 << 30)

    def report(seconds: float, size: float, **case: object) -> None:
        rate = size / seconds
        figures = {
            "us": round(seconds * 1e6, 1),
            "gb_s": round(rate / 1e9, 3),
            "share_of_copy": round(rate / copies, 3),
        }
        print(json.dumps(case | figures), flush=True)

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    ops, sizes = GpuOps(device, dtype), DeltaSizes(*(TINY if tiny else QWEN))
    heads = numbers(sizes.heads).abs()
    kernel, norm = numbers(sizes.kernel, sizes.mixed), numbers(sizes.value_dim)
    rule = ops.delta_rule(sizes, DeltaWeights(kernel, heads, heads, norm, 1e-6))
    widths = (sizes.mixed, sizes.values, sizes.heads, sizes.heads)
    cases = [(count, 1) for count in ((2,) if tiny else DECODES)] + [(1, rows) for rows in ((40,) if tiny else PROMPTS)]
    for count, rows in cases:
        batch = timing.batch([64] * count, rows, [[0, 0]] * count, device)
        mixed, z, b, a = numbers(count * rows, sum(widths), dtype=dtype).split(widths, dim=1)
        cache = rule.new_cache(count)
        cache.conv.zero_()
        cache.state.zero_()
        took = timing.seconds(lambda: rule(mixed, z, b, a, cache, batch, None), device)  # noqa: B023
        size = 2 * count * cache.state[0].nbytes + 2 * count * rows * sum(widths[:2]) * dtype.itemsize
        report(took, size, layer="gated delta rule", sequences=count, rows=rows)
    for count in (2,) if tiny else DECODES:
        logits = numbers(count, 300 if tiny else VOCABULARY, dtype=dtype)
        for name, cut in CUTS.items():
            filters = np.repeat(np.array([cut], np.float32), count, axis=0)
            sampling = Sampling(filters, np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
            took = timing.seconds(lambda: ops.sample(logits, sampling), device)  # noqa: B023
            report(took, logits.nbytes, tokens=name, rows=count)


if __name__ == "__main__":
    main()
