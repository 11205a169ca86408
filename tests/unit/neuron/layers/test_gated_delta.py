"""The Gated DeltaNet layer: a sequence's output does not depend on how its rows are split or batched."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.block import Step
from helexa.neuron.layers.gated_delta import GatedDeltaNet
from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.batch import Span
from helexa.neuron.ops.gated_delta import DeltaRule
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.state_cache import MatrixCache
from helexa.neuron.weights.model_file import WHOLE, Part
from helexa.neuron.weights.quantized_matrix import Weight
from neuron.ops import random_weights
from neuron.ops.paging import batch_of_spans

HIDDEN, KEY_HEADS, HEADS, KEY, VALUE, KERNEL = 64, 2, 6, 8, 16, 4
KEYS, VALUES = KEY_HEADS * KEY, HEADS * VALUE
SHAPES: dict[str, tuple[int, ...]] = {
    "in_proj_qkv.weight": (2 * KEYS + VALUES, HIDDEN),
    "in_proj_z.weight": (VALUES, HIDDEN),
    "in_proj_b.weight": (HEADS, HIDDEN),
    "in_proj_a.weight": (HEADS, HIDDEN),
    "conv1d.weight": (2 * KEYS + VALUES, 1, KERNEL),
    "A_log": (HEADS,),
    "dt_bias": (HEADS,),
    "norm.weight": (VALUE,),
    "out_proj.weight": (HIDDEN, VALUES),
}
SLOTS = 8


@dataclass
class Tensors:
    """A checkpoint in memory."""

    tensors: dict[str, Weight]
    total_bytes: int = 0

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        weight = self.tensors[name]
        if part.rows is None:
            return weight
        rows = torch.from_numpy(part.rows)
        return weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)


@pytest.fixture
def tensors() -> dict[str, Weight]:
    torch.manual_seed(3)
    return {f"delta.{name}": 0.3 * torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.fixture(params=[False, True], ids=["one by one", "together"])
def layer(tensors: dict[str, Weight], request: pytest.FixtureRequest) -> GatedDeltaNet:
    """The layer on a CPU, and with the batched single-token path that other devices use."""
    layer = built(tensors)
    assert isinstance(layer._rule, DeltaRule)
    layer._rule._together = request.param
    return layer


def built(tensors: dict[str, Weight], heads: int = HEADS, key_dim: int = KEY) -> GatedDeltaNet:
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    loader = Loader(Tensors(tensors), ops, lambda done: None)  # type: ignore[arg-type]
    return GatedDeltaNet(
        loader,
        "delta",
        hidden=HIDDEN,
        key_heads=KEY_HEADS,
        heads=heads,
        key_dim=key_dim,
        value_dim=VALUE,
        kernel=KERNEL,
        eps=1e-6,
    )


def spoilt_cache(layer: GatedDeltaNet) -> MatrixCache:
    """A cache whose slots start with NaN, to show that stale states are not read."""
    cache = layer.new_cache(0, SLOTS)
    cache.conv.fill_(torch.nan)
    cache.state.fill_(torch.nan)
    return cache


def step_of(*spans: tuple[int, int, int, int]) -> Step:
    """Return a step with one span per (slot, prefix, settled, drafts)."""
    laid: list[Span] = []
    start = 0
    for slot, prefix, settled, drafts in spans:
        laid.append(Span(start, start + settled + drafts, prefix, settled, slot))
        start += settled + drafts
    return Step(batch_of_spans(laid))


def token_by_token(layer: GatedDeltaNet, x: Tensor) -> Tensor:
    """Return the output of a sequence that is computed alone, token by token."""
    cache = spoilt_cache(layer)
    return torch.cat([layer(row[None], cache, step_of((0, place, 1, 0))) for place, row in enumerate(x)])


def near(actual: Tensor, expected: Tensor) -> None:
    """Assert equality. The tolerance is wide because the norm after the rule amplifies errors of nearly empty heads."""
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("cuts", [[150], [1, 149], [16, 17, 117], [64, 64, 22], [3, 2, 1, 80, 64]])
def test_chunked_sequence_gives_the_results_of_token_by_token_computation(
    layer: GatedDeltaNet, cuts: list[int]
) -> None:
    x, cache, prefix = torch.randn(150, HIDDEN), spoilt_cache(layer), 0
    outputs = []
    for count in cuts:
        outputs.append(layer(x[prefix : prefix + count], cache, step_of((2, prefix, count, 0))))
        prefix += count
    near(torch.cat(outputs), token_by_token(layer, x))


def test_long_prompt_in_one_step_gives_the_results_of_token_by_token_computation(layer: GatedDeltaNet) -> None:
    x = torch.randn(2100, HIDDEN)
    near(layer(x, spoilt_cache(layer), step_of((0, 0, 2100, 0))), token_by_token(layer, x))


def test_sequences_in_a_batch_give_the_results_of_separate_sequences(layer: GatedDeltaNet) -> None:
    prefixes, counts = [5, 0, 70, 20, 0, 3], [1, 1, 1, 2, 30, 90]
    inputs = [torch.randn(prefix + count, HIDDEN) for prefix, count in zip(prefixes, counts, strict=True)]
    cache, slots = spoilt_cache(layer), [6, 1, 3, 0, 7, 2]
    for slot, prefix, x in zip(slots, prefixes, inputs, strict=True):
        if prefix:
            layer(x[:prefix], cache, step_of((slot, 0, prefix, 0)))
    step = step_of(*zip(slots, prefixes, counts, [0] * 6, strict=True))
    out = layer(torch.cat([x[prefix:] for x, prefix in zip(inputs, prefixes, strict=True)]), cache, step)
    for actual, x, count in zip(out.split(counts), inputs, counts, strict=True):
        near(actual, token_by_token(layer, x)[-count:])
    again = torch.randn(len(slots), HIDDEN)  # checks the states by continuing every sequence
    out = layer(again, cache, step_of(*((slot, len(x), 1, 0) for slot, x in zip(slots, inputs, strict=True))))
    for actual, x, row in zip(out, inputs, again, strict=True):
        near(actual, token_by_token(layer, torch.cat((x, row[None])))[-1])


def test_rejected_drafts_do_not_change_the_recurrent_state(layer: GatedDeltaNet) -> None:
    x, cache = torch.randn(12, HIDDEN), spoilt_cache(layer)
    layer(x[:5], cache, step_of((4, 0, 5, 0)))
    drafted = layer(torch.cat((x[5:8], torch.randn(1, HIDDEN), x[5:])), cache, step_of((1, 0, 1, 3), (4, 5, 3, 4)))
    near(drafted[4:], token_by_token(layer, x)[5:])
    continued = torch.cat((x[:8], torch.randn(4, HIDDEN)))
    near(layer(continued[8:], cache, step_of((4, 8, 4, 0))), token_by_token(layer, continued)[8:])


def test_copied_recurrent_state_continues_like_its_source(layer: GatedDeltaNet) -> None:
    x, cache = torch.randn(40, HIDDEN), spoilt_cache(layer)
    layer(x[:30], cache, step_of((0, 0, 30, 0)))
    cache.copy(0, 5)
    for slot in (0, 5):
        near(layer(x[30:], cache, step_of((slot, 30, 10, 0))), token_by_token(layer, x)[30:])


def test_gated_delta_layer_returns_only_the_requested_rows(layer: GatedDeltaNet) -> None:
    x, rows = torch.randn(20, HIDDEN), torch.tensor([3, 19])
    all_rows, step = layer(x, spoilt_cache(layer), step_of((0, 0, 20, 0))), step_of((0, 0, 20, 0))
    near(layer(x, spoilt_cache(layer), step, rows), all_rows[rows])
    assert layer(x, spoilt_cache(layer), step, rows[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("form", ["bfloat16", "Q8_0"])
def test_projections_grouped_by_key_head_give_the_output_of_ungrouped_ones(
    tensors: dict[str, Weight], form: str
) -> None:
    served = HEADS // KEY_HEADS
    grouped = {
        "qkvz": (random_weights.make(form, 2 * KEYS + 2 * VALUES, HIDDEN), (KEY, KEY, served * VALUE, served * VALUE)),
        "ba": (random_weights.make(form, 2 * HEADS, HIDDEN), (served, served)),
    }
    ungrouped: dict[str, list[Tensor]] = {name: [] for name in "qkvzba"}
    for names, (weight, widths) in grouped.items():
        for group in random_weights.plain(weight).float().chunk(KEY_HEADS):
            for name, rows in zip(names, group.split(widths), strict=True):
                ungrouped[name].append(rows)
    q, k, v, z, b, a = (torch.cat(ungrouped[name]) for name in "qkvzba")
    other_tensors = {name: weight for name, weight in tensors.items() if "in_proj" not in name}
    stored = {f"delta.in_proj_{names}.weight": weight for names, (weight, _) in grouped.items()}
    split = {"qkv": torch.cat((q, k, v)), "z": z, "b": b, "a": a}
    x, step = torch.randn(30, HIDDEN), step_of((0, 0, 30, 0))
    expected = built(other_tensors | {f"delta.in_proj_{name}.weight": weight for name, weight in split.items()})
    actual = built(other_tensors | stored)
    near(actual(x, spoilt_cache(actual), step), expected(x, spoilt_cache(expected), step))


def test_gated_delta_layer_with_invalid_shapes_is_rejected(tensors: dict[str, Weight]) -> None:
    with pytest.raises(ModelFileError, match="7 value heads cannot share 2 key heads"):
        built(tensors, heads=7)
    with pytest.raises(ModelFileError, match="needs a recurrent state of"):
        built(tensors, key_dim=1 << 20)
    with pytest.raises(ModelFileError, match="in_proj_qkv"):
        built(tensors, key_dim=KEY + 1)
