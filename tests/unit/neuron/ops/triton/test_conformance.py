"""The Triton operations pass the conformance tests.

The interpreter takes seconds for some cases, so `make test` covers each value of a parameter, not each combination.
"""

from itertools import product

import pytest
import torch

from helexa.neuron.ops.batch import AttentionKind
from helexa.neuron.ops.expert_routing_and_mixture import Clamp
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from neuron.ops.conformance import ATTENTION_KINDS, FRAMES, MIXTURES, PRODUCTS, ROUTINGS, CacheConformance, Conformance
from neuron.ops.paging import CPU
from nightly import daily

KINDS = list(product(ATTENTION_KINDS, (64, 32)))


class TestTriton(Conformance):
    tolerance = 1e-3  # scales of two levels are merged into one float16
    cache_tolerance = 1e-4
    mixture_rows = 2

    @pytest.fixture
    def ops(self) -> Ops:
        return GpuOps(CPU, torch.float32)

    @pytest.mark.parametrize("heads", daily([34], [3, 34]))
    def test_attend_uses_keys_as_values_in_a_cache_without_values(self, ops: Ops, heads: int) -> None:
        super().test_attend_uses_keys_as_values_in_a_cache_without_values(ops, heads)

    @pytest.mark.parametrize("window", daily([40], [None, 40]))
    def test_layer_reads_normalized_keys_and_values_of_wide_heads_that_another_layer_stored(
        self, ops: Ops, window: int | None
    ) -> None:
        super().test_layer_reads_normalized_keys_and_values_of_wide_heads_that_another_layer_stored(ops, window)

    @pytest.mark.parametrize(("kind", "rotated"), daily([KINDS[0], KINDS[3]], KINDS, several=True))
    def test_rotate_store_and_attend_match_float64_attention_over_several_steps(
        self, ops: Ops, kind: AttentionKind, rotated: int
    ) -> None:
        super().test_rotate_store_and_attend_match_float64_attention_over_several_steps(ops, kind, rotated)

    @pytest.mark.parametrize(("names", "gate"), daily([*PRODUCTS[::4], PRODUCTS[-1]], PRODUCTS, several=True))
    def test_linear_matches_the_float64_product_with_bias_and_gate(
        self, ops: Ops, names: tuple[str, ...], gate: str | None
    ) -> None:
        super().test_linear_matches_the_float64_product_with_bias_and_gate(ops, names, gate)

    @pytest.mark.parametrize(("size", "lengths"), daily([FRAMES[case] for case in (0, 6, 9, 11)], FRAMES, several=True))
    def test_attend_frames_matches_float64_attention_within_each_frame(
        self, ops: Ops, size: tuple[int, int | None], lengths: tuple[int, ...]
    ) -> None:
        super().test_attend_frames_matches_float64_attention_within_each_frame(ops, size, lengths)

    @pytest.mark.parametrize(("weights", "alike", "clamp"), daily(MIXTURES[::5], MIXTURES, several=True))
    def test_mixture_matches_the_weighted_sum_of_the_chosen_experts(
        self, ops: Ops, weights: str, alike: bool, clamp: Clamp | None
    ) -> None:
        super().test_mixture_matches_the_weighted_sum_of_the_chosen_experts(ops, weights, alike, clamp)

    @pytest.mark.parametrize("form", daily(list(ROUTINGS)[1:3], ROUTINGS))
    def test_mixture_chooses_experts_by_value_bias_and_group(self, ops: Ops, form: str) -> None:
        super().test_mixture_chooses_experts_by_value_bias_and_group(ops, form)

    @pytest.mark.parametrize("value_dim", daily([48], [64, 48]))
    def test_delta_rule_equals_plain_torch(self, ops: Ops, value_dim: int) -> None:
        super().test_delta_rule_equals_plain_torch(ops, value_dim)


class TestTritonInBytes(CacheConformance):
    cache_tolerance = 4e-2

    @pytest.fixture
    def ops(self) -> Ops:
        return GpuOps(CPU, torch.float32, kv_bits=8)

    @pytest.mark.parametrize("heads", daily([3], [3, 34]))
    def test_attend_uses_keys_as_values_in_a_cache_without_values(self, ops: Ops, heads: int) -> None:
        super().test_attend_uses_keys_as_values_in_a_cache_without_values(ops, heads)

    @pytest.mark.nightly
    def test_attend_sampled_equals_the_sampled_rows_of_attend(self, ops: Ops) -> None:
        super().test_attend_sampled_equals_the_sampled_rows_of_attend(ops)

    @pytest.mark.parametrize("window", daily([], [None, 40]))
    def test_layer_reads_normalized_keys_and_values_of_wide_heads_that_another_layer_stored(
        self, ops: Ops, window: int | None
    ) -> None:
        super().test_layer_reads_normalized_keys_and_values_of_wide_heads_that_another_layer_stored(ops, window)

    @pytest.mark.parametrize(("kind", "rotated"), daily(KINDS[3:], KINDS, several=True))
    def test_rotate_store_and_attend_match_float64_attention_over_several_steps(
        self, ops: Ops, kind: AttentionKind, rotated: int
    ) -> None:
        super().test_rotate_store_and_attend_match_float64_attention_over_several_steps(ops, kind, rotated)
