"""The gated delta rule's kernels compared with plain torch: outputs and states over several steps."""

import dataclasses

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Span
from helexa.neuron.ops.gated_delta import DeltaOp, DeltaSizes, DeltaWeights
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties
from neuron.ops import paging

SLOTS = 5
PLAIN = DeltaSizes(key_heads=1, heads=1, key_dim=16, value_dim=16, kernel=4)
ODD = DeltaSizes(key_heads=2, heads=4, key_dim=24, value_dim=40, kernel=3)
SpanOf = tuple[int, int, int, int]  # slot, prefix, settled, drafts


class Both:
    """The same layer in Triton kernels and in plain torch. All slots start with NaN."""

    def __init__(self, sizes: DeltaSizes, dtype: torch.dtype = torch.float32, gpu: GpuProperties | None = None) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.weights = weights = DeltaWeights(
            kernel=torch.randn(sizes.kernel, sizes.mixed) * 0.5,
            rate=torch.rand(sizes.heads) * 4,
            bias=torch.randn(sizes.heads),
            norm=torch.rand(sizes.value_dim) + 0.5,
            eps=1e-6,
        )
        cpu = torch.device("cpu")
        kernels = GpuOps(cpu, dtype, gpu=gpu), ReferenceOps(cpu, dtype)
        self.rules: list[DeltaOp] = [ops.delta_rule(sizes, weights) for ops in kernels]
        self.caches = [rule.new_cache(SLOTS) for rule in self.rules]
        for cache in self.caches:
            cache.conv.fill_(torch.nan)
            cache.state.fill_(torch.nan)

    def step(self, *spans: SpanOf, inputs: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Run one step on both layers and return both outputs. Spans of one row come first."""
        batch = batch_of(spans)
        mixed, z, b, a = inputs or self.inputs(len(batch.tokens))
        outputs = [
            rule(mixed.clone(), z, b, a, cache, batch, None)
            for rule, cache in zip(self.rules, self.caches, strict=True)
        ]
        return outputs[0], outputs[1]

    def inputs(self, rows: int) -> list[Tensor]:
        """Return q/k/v, z, b and a as slices of one tensor, as a product returns them."""
        widths = (self.sizes.mixed, self.sizes.values, self.sizes.heads, self.sizes.heads)
        return list(torch.randn(rows, sum(widths)).to(self.dtype).split(widths, dim=1))

    def states(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.caches[0].state[slot], self.caches[1].state[slot]


def batch_of(spans: tuple[SpanOf, ...]) -> Batch:
    laid: list[Span] = []
    start = 0
    for slot, prefix, settled, drafts in spans:
        laid.append(Span(start, start + settled + drafts, prefix, settled, slot))
        start += settled + drafts
    return paging.batch_of_spans(laid)


def near(pair: tuple[Tensor, Tensor], tolerance: float = 1e-4) -> None:
    actual, expected = pair
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_delta_rule_with_prompts_drafts_and_continued_sequences_matches_torch() -> None:
    both = Both(ODD)
    near(both.step((3, 0, 1, 0), (1, 0, 2, 0), (0, 0, 66, 0)))
    near(both.step((1, 2, 1, 0), (3, 1, 1, 0), (4, 0, 3, 2)))
    near(both.step((0, 66, 1, 0), (4, 3, 1, 0), (3, 2, 2, 1), (1, 3, 33, 2)))
    near(both.step(*((slot, prefix, 1, 0) for slot, prefix in ((0, 67), (1, 36), (3, 4), (4, 4)))))
    for slot in (0, 1, 3, 4):
        near(both.states(slot))
    assert both.caches[0].state[2].isnan().all(), "nobody was there"
    assert both.caches[0].conv[2].isnan().all()


@pytest.mark.parametrize("keys", ["identical", "opposite"])
def test_delta_rule_with_repeated_keys_and_no_decay_matches_torch(keys: str) -> None:
    both = Both(PLAIN)
    both.weights.kernel.zero_()[-1] = 1
    both.weights.rate.zero_()
    mixed, z, b, a = both.inputs(70)
    mixed[:, 16:32] = mixed[0, 16:32].abs() + 0.1
    if keys == "opposite":
        mixed[::2, 16:24] = -20.0  # silu makes these nearly zero
        mixed[1::2, 24:32] = -20.0
    near(both.step((0, 0, 70, 0), inputs=[mixed, z, b + 30, a]))
    near(both.states(0))


def test_delta_rule_in_half_precision_with_non_finite_rows_matches_torch() -> None:
    both = Both(PLAIN, torch.float16)
    inputs = both.inputs(38)
    spans = ((2, 0, 1, 0), (3, 0, 1, 0), (0, 0, 3, 0), (1, 0, 33, 0))
    actual, expected = both.step(*spans, inputs=inputs)
    near((actual.float(), expected.float()), 1e-2)
    initial_states = [state.clone() for state in both.caches[0].state]
    for part in inputs:
        part[[1, 3]] = torch.nan
    hurt, _ = both.step(*spans, inputs=inputs)
    assert hurt[[1, 3]].isnan().all()
    for rows in (slice(0, 1), slice(5, 38)):
        assert torch.equal(hurt[rows], actual[rows])
    assert torch.equal(both.caches[0].state[1], initial_states[1])


def test_delta_rule_on_a_gpu_without_float32_tensor_cores_runs_row_by_row() -> None:
    both = Both(PLAIN, gpu=GpuProperties((7, 5), 64 << 10, 40))
    near(both.step((0, 0, 1, 0), (1, 0, 34, 1)))
    near(both.states(1))


def test_padding_spans_do_not_change_the_delta_rule() -> None:
    both = Both(PLAIN)
    batch, inputs = batch_of(((1, 0, 1, 0), (2, 0, 1, 0))), both.inputs(3)
    starts, settled = torch.tensor([0, 1, 1, 1], dtype=torch.int32), torch.tensor([1, 0, 0], dtype=torch.int32)
    spans = dataclasses.replace(batch.spans, starts=starts, prefixes=settled * 0, settled=settled, state_slots=settled)
    batch = dataclasses.replace(batch, device_spans=spans, singles=3)
    mixed, z, b, a = inputs
    both.rules[0](mixed, z, b, a, both.caches[0], batch, None)
    assert both.caches[0].state[1].isfinite().all()
    assert both.caches[0].state[[0, 2]].isnan().all()
    assert both.caches[0].conv[0].isnan().all()
