"""Kernel launches of important models, each to be compiled for every card (see `compiling.py`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind, Span
from helexa.neuron.ops.expert_routing_and_mixture import BestGroups, Clamp, Routing
from helexa.neuron.ops.gated_delta import DeltaSizes, DeltaWeights
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.linear_and_norm_operators import HeadNorms
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from helexa.neuron.ops.triton.mixture import GpuMixture, route
from helexa.neuron.ops.triton.packed_weights import PackedMatrix
from neuron.ops import paging
from neuron.ops.drawn_rows import drawn
from nightly import NIGHTLY


@dataclass(frozen=True)
class Launch:
    """A call of kernels with tensors on `meta`.

    Attributes:
        kv_bits: Bits per value of the KV cache.
        cards: Names of the cards to compile for.
    """

    call: Callable[[GpuOps], object]
    kv_bits: int = 16
    cards: tuple[str, ...] = ("sm_75", "sm_86", "sm_90", "sm_120")

    def __call__(self, ops: GpuOps) -> None:
        self.call(ops)


def _cards(*daily: str, nightly: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cards for which a slow kernel is compiled: `nightly` ones only in `make nightly`."""
    return (*daily, *nightly) if NIGHTLY else daily


def _numbers(ops: GpuOps, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or ops.dtype, device=ops.device)


def _rms_norm(ops: GpuOps, hidden: int) -> None:
    norm = ops.rms_norm(_numbers(ops, hidden, dtype=torch.float32), 1e-6)
    norm(_numbers(ops, 4, hidden, dtype=torch.float32), _numbers(ops, 4, hidden))


def _packed(ops: GpuOps, form: str, outputs: int, columns: int) -> PackedMatrix:
    bits, group, minimum, table = {
        "W4": (4, 32, True, False),
        "W6": (6, 16, False, False),
        "W8": (8, 32, False, False),
        "table": (4, 32, False, True),
    }[form]

    def scale() -> Tensor:
        return _numbers(ops, -(-outputs // 4), columns // group, 4, dtype=torch.float16)

    return PackedMatrix(
        words=_numbers(ops, outputs, columns // (4 if bits == 8 else 8), dtype=torch.int32),
        high=_numbers(ops, outputs, columns // 8, dtype=torch.int16) if bits == 6 else None,
        scale=scale(),
        minimum=scale() if minimum else None,
        zero=0 if minimum or table else 1 << bits - 1,
        bits=bits,
        group_size=group,
        table=_numbers(ops, 16, dtype=torch.float32) if table else None,
    )


def _product(ops: GpuOps, form: str, rows: int, outputs: int = 4096, columns: int = 4096) -> None:
    ops.linear([_packed(ops, form, outputs, columns)], None)(_numbers(ops, rows, columns))


def _embedding(ops: GpuOps) -> None:
    ops.embedding(_packed(ops, "W8", 151936, 4096), _numbers(ops, 70_000, dtype=torch.int64))


def _experts_30b(ops: GpuOps, rows: int, form: str | None) -> None:
    """A mixture of experts as in Qwen3-30B-A3B."""
    shapes = ((128 * 1536, 2048), (128 * 2048, 768))
    gate_up, down = (_packed(ops, form, *shape) if form else _numbers(ops, *shape) for shape in shapes)
    routing = Routing(8, "normalized")
    mixture = GpuMixture(128, gate_up, down, (None, None), routing, None, ops.dtype, ops.gpu)
    mixture(_numbers(ops, rows, 2048), _numbers(ops, rows, 128))


def _experts_gpt_oss(ops: GpuOps, rows: int) -> None:
    """A mixture of experts as in gpt-oss-20b."""
    gate_up, down = _packed(ops, "table", 32 * 5760, 2880), _packed(ops, "table", 32 * 2880, 2880)
    biases = (_numbers(ops, 32 * 5760, dtype=torch.float32), _numbers(ops, 32 * 2880, dtype=torch.float32))
    routing, clamp = Routing(4, "scores"), Clamp(1.702, 7.0)
    mixture = GpuMixture(32, gate_up, down, biases, routing, clamp, ops.dtype, ops.gpu)
    mixture(_numbers(ops, rows, 2880), _numbers(ops, rows, 32))


def _route(ops: GpuOps) -> None:
    """The choice of experts as in DeepSeek-V3."""
    bias, factors = (_numbers(ops, 256, dtype=torch.float32) for _ in range(2))
    route(_numbers(ops, 4, 256), Routing(8, "normalized", "sigmoid", bias, BestGroups(8, 4, 2), factors))


def _delta_rule(ops: GpuOps, *rows: int) -> None:
    sizes = DeltaSizes(key_heads=16, heads=48, key_dim=128, value_dim=128, kernel=4)
    heads = _numbers(ops, 48, dtype=torch.float32)
    norm = _numbers(ops, 128, dtype=torch.float32)
    weights = DeltaWeights(_numbers(ops, 4, sizes.mixed, dtype=torch.float32), heads, heads, norm, 1e-6)
    rule = ops.delta_rule(sizes, weights)
    widths, count = (sizes.mixed, sizes.values, 48, 48), sum(rows)
    mixed, z, b, a = _numbers(ops, count, sum(widths)).split(widths, dim=1)
    starts = [sum(rows[:place]) for place in range(len(rows))]
    spans = [Span(start, start + n, 64, n, 0) for start, n in zip(starts, rows, strict=True)]
    batch = paging.batch_of_spans(spans, [[1, 2]] * len(rows), ops.device)
    rule(mixed, z, b, a, rule.new_cache(2), batch, None)


def _choose(ops: GpuOps) -> None:
    ops.sample(_numbers(ops, 1, 151936), drawn((0.7, 20, 0.95, 0.05, 0.5)))


@dataclass(frozen=True)
class _Heads:
    """A model's attention shape: query heads, KV heads, head size, and number of rotated dimensions."""

    queries: int
    kv: int
    dim: int
    rotated: int


_QWEN3_8B = _Heads(32, 8, 128, 128)
_QWEN3_27B = _Heads(24, 4, 256, 64)  # Qwen3.5's
_GPT_OSS = _Heads(64, 8, 64, 64)
_GEMMA4 = _Heads(8, 1, 512, 512)  # layers with full attention


def _attend(ops: GpuOps, heads: _Heads, spans: list[Span], kind: AttentionKind | None = None, pages: int = 100) -> None:
    pages_of = [list(range(-(-(span.prefix + span.stop - span.start) // PAGE_SIZE))) for span in spans]
    batch, rows = paging.batch_of_spans(spans, pages_of, ops.device), spans[-1].stop
    queries, cache = _numbers(ops, rows, heads.queries, heads.dim), ops.new_cache(heads.kv, pages, heads.dim)
    ops.attend(queries, cache, batch, kind or AttentionKind(heads.dim**-0.5))


def _decode(ops: GpuOps, heads: _Heads) -> None:
    _attend(ops, heads, [Span(0, 1, 2000, 1, 0)])


def _mixed(ops: GpuOps, heads: _Heads, window: int | None = None) -> None:
    sinks = _numbers(ops, heads.queries, dtype=torch.float32) if window else None
    kind = AttentionKind(heads.dim**-0.5, window, sinks)
    _attend(ops, heads, [Span(0, 1, 0, 1, 0), Span(1, 2000, 3000, 1, 0)], kind)


def _rotate_store(ops: GpuOps, heads: _Heads, pages: int = 100) -> None:
    weight = _numbers(ops, heads.dim, dtype=torch.float32)
    rope = _numbers(ops, 4, heads.rotated // 2, dtype=torch.float32)
    qkv = _numbers(ops, 4, heads.queries + 2 * heads.kv, heads.dim)
    slots = _numbers(ops, 4, dtype=torch.int64)
    cache = ops.new_cache(heads.kv, pages, heads.dim)
    ops.rotate_store(qkv, heads.queries, (rope, rope), cache, slots, HeadNorms(weight, weight, 1e-6))


def _frames(ops: GpuOps, heads: int, dim: int, rotated: int, lengths: tuple[int, ...]) -> None:
    rope = _numbers(ops, sum(lengths), rotated // 2, dtype=torch.float32)
    ops.attend_frames(_numbers(ops, sum(lengths), 3 * heads, dim), (rope, rope), lengths, dim**-0.5)


def _layer_norm(ops: GpuOps, hidden: int) -> None:
    weight = _numbers(ops, hidden, dtype=torch.float32)
    ops.layer_norm(weight, weight, 1e-6)(_numbers(ops, 4, hidden, dtype=torch.float32), _numbers(ops, 4, hidden))


def _caches(ops: GpuOps) -> None:
    """Use one cache of few pages, and one of more than 2 ** 31 values."""
    for pages in (100, 1 << 20):
        _attend(ops, _GPT_OSS, [Span(0, 40, 0, 40, 0)], pages=pages)
        _rotate_store(ops, _GPT_OSS, pages)


# Each kernel for each card. Other models' shapes are included if they need the most registers or memory.
LAUNCHES = {
    "rms_norm 8B": Launch(lambda ops: _rms_norm(ops, 4096)),
    "W4 row 8B": Launch(lambda ops: _product(ops, "W4", 1), cards=_cards("sm_90", nightly=("sm_86", "sm_120"))),
    "W4 rows 8B": Launch(lambda ops: _product(ops, "W4", 16), cards=("sm_75", "sm_86")),
    "W4 more rows 8B": Launch(lambda ops: _product(ops, "W4", 64), cards=("sm_120",)),
    "W4 many rows 8B": Launch(lambda ops: _product(ops, "W4", 512), cards=("sm_90",)),
    "W6 row 27B": Launch(lambda ops: _product(ops, "W6", 1, 5120, 17408), cards=("sm_90",)),
    "W8 row, head of Gemma 3": Launch(lambda ops: _product(ops, "W8", 1, 262208, 2560), cards=("sm_75",)),
    "W8 embedding 8B": Launch(_embedding, cards=("sm_75",)),
    "W4 experts 30B-A3B": Launch(lambda ops: _experts_30b(ops, 1, "W4"), cards=("sm_90",)),
    "W4 experts 30B-A3B, rows": Launch(lambda ops: _experts_30b(ops, 64, "W4"), cards=("sm_75",)),
    "experts 30B-A3B": Launch(lambda ops: _experts_30b(ops, 1, None), cards=("sm_90",)),
    "experts 30B-A3B, rows": Launch(lambda ops: _experts_30b(ops, 4096, None), cards=("sm_90",)),
    "experts gpt-oss, rows": Launch(lambda ops: _experts_gpt_oss(ops, 1024), cards=("sm_120",)),
    "route DeepSeek-V3": Launch(_route, cards=("sm_75",)),
    "choose": Launch(_choose, cards=("sm_75", "sm_90")),
    "delta_rule 27B": Launch(
        lambda ops: _delta_rule(ops, 1), cards=_cards("sm_75", "sm_90", nightly=("sm_86", "sm_120"))
    ),
    "delta_rule 27B prompts": Launch(lambda ops: _delta_rule(ops, 200), cards=("sm_90",)),
    "gate_mul 8B": Launch(lambda ops: ops.gate_mul(_numbers(ops, 4, 2 * 12288), "silu")),
    "rotate_store 8B": Launch(lambda ops: _rotate_store(ops, _QWEN3_8B), cards=("sm_75", "sm_90")),
    "rotate_store 27B": Launch(lambda ops: _rotate_store(ops, _QWEN3_27B), cards=("sm_86",)),
    "rotate_store 8B in bytes": Launch(lambda ops: _rotate_store(ops, _QWEN3_8B), kv_bits=8, cards=("sm_120",)),
    "decode 27B": Launch(lambda ops: _decode(ops, _QWEN3_27B), cards=("sm_75",)),
    "attention 8B": Launch(lambda ops: _mixed(ops, _QWEN3_8B), cards=("sm_86", "sm_90")),
    "attention 27B": Launch(lambda ops: _mixed(ops, _QWEN3_27B), cards=("sm_86",)),
    "attention of wide heads": Launch(
        lambda ops: _mixed(ops, _GEMMA4), cards=_cards("sm_90", nightly=("sm_86", "sm_120"))
    ),
    "attention of wide heads in bytes": Launch(
        lambda ops: _mixed(ops, _GEMMA4), kv_bits=8, cards=_cards("sm_86", nightly=("sm_90",))
    ),
    "rotate_store of wide heads": Launch(lambda ops: _rotate_store(ops, _GEMMA4), cards=("sm_75",)),
    "attention 8B in bytes": Launch(lambda ops: _mixed(ops, _QWEN3_8B), kv_bits=8, cards=("sm_86",)),
    "caches of any size": Launch(_caches, cards=("sm_90",)),
    "vision tower 4B": Launch(
        lambda ops: _frames(ops, 16, 64, 64, (4096,)), cards=_cards("sm_90", nightly=("sm_86", "sm_120"))
    ),
    "vision tower 27B": Launch(
        lambda ops: _frames(ops, 16, 80, 72, (4096, 64)), cards=_cards("sm_120", nightly=("sm_86", "sm_90"))
    ),
    "layer_norm 27B": Launch(lambda ops: _layer_norm(ops, 1152)),
    "gelu 27B": Launch(lambda ops: ops.activate(_numbers(ops, 4, 4608), "gelu"), cards=("sm_75", "sm_90")),
    "attention gpt-oss": Launch(lambda ops: _mixed(ops, _GPT_OSS, 128), cards=("sm_120",)),
}
