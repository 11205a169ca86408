"""The native sampling kernel keeps and draws the tokens that the definition of each filter says."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helexa.neuron.ops.kernel_header import NON_FINITE
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.sampling import Adjustments, Sampling, uniforms
from helexa.neuron.tensors import get_num_threads
from neuron.ops.drawn_rows import drawn

Filters = tuple[float, float, float, float]
"""Temperature, top-k, top-p and min-p."""

FILTERS: list[Filters] = [
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (2.5, 0, 1.0, 0.0),
    (0.8, 40, 0.9, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.0, 300, 0.999, 0.0),
    (1.0, 5000, 1.0, 0.0),
    (0.7, 0, 0.5, 0.0),
    (5.0, 0, 0.95, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (3.0, 0, 1.0, 1e-4),
    (1.5, 64, 0.8, 0.1),
    (1e-3, 20, 0.95, 0.0),
]


def kept(logits: NDArray[np.float64], filters: Filters) -> NDArray[np.float64]:
    """Return the probabilities of all tokens after the filters, which are 0 for removed tokens."""
    temperature, top_k, top_p, min_p = filters
    weights = np.exp((logits - logits.max()) / temperature)
    ranked = np.sort(weights)[::-1]
    mass = weights.sum()
    if 0 < top_k < len(ranked):
        ranked = ranked[: int(top_k)]
        mass = ranked.sum()
    preceding = (ranked.cumsum() - ranked) / mass
    is_kept = ((preceding < top_p) | (top_p >= 1)) & (ranked >= min_p * ranked[0])
    is_kept[0] = True
    weights[weights < ranked[is_kept].min()] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("width", [3, 16, 100, 4097, 50_000])
def test_native_sampling_draws_tokens_by_their_filtered_probabilities(
    native: NativeOps, width: int, filters: Filters
) -> None:
    """The middle of the part of [0, 1) that belongs to a token draws this token."""
    generator = np.random.default_rng(width)
    logits = generator.normal(0, 2.5, width).astype(np.float32)
    probabilities = kept(logits.astype(np.float64), filters)
    ends = probabilities.cumsum()
    tokens = np.flatnonzero(probabilities > 3e-6)  # the random number is a float32
    tokens = generator.choice(tokens, min(len(tokens), 150), replace=False)
    rows = np.tile(logits, (len(tokens), 1))
    sampling = drawn(*((*filters, share) for share in (ends - probabilities / 2)[tokens]))
    assert native.sample(torch.from_numpy(rows), sampling).tolist() == tokens.tolist()


def test_extreme_random_numbers_select_only_tokens_that_the_filters_keep(native: NativeOps) -> None:
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 123], logits[:, 456], logits[:, 789] = 1.0, 2.0, -200.0
    for filters in FILTERS:
        sampling = drawn((*filters, 0), (*filters, 1 - 2**-53))
        assert set(native.sample(logits, sampling).tolist()) <= {123, 456}


def test_filters_keep_or_remove_tokens_with_equal_logits_together(native: NativeOps) -> None:
    logits = torch.zeros(200, 1000)
    logits[:, 500] = 5.0
    for filters in ((1.0, 3, 1.0, 0.0), (1.0, 0, 0.1, 0.0)):
        tokens = native.sample(logits, drawn(*((*filters, place / 200) for place in range(200))))
        assert (len(tokens.unique()) == 1) == (filters[1] == 0)


def test_row_samples_the_same_token_alone_and_in_a_batch(native: NativeOps) -> None:
    logits = torch.randn(40, 5000) * 2
    rows = [FILTERS[row % len(FILTERS)] + (row / 40,) for row in range(40)]
    rows[::7] = [(0, *row[1:]) for row in rows[::7]]
    together = native.sample(logits, drawn(*rows)).tolist()
    for row in range(40):
        assert native.sample(logits[row : row + 1], drawn(rows[row])).tolist() == [together[row]]


@pytest.mark.parametrize("width", [1, 15, 16, 17, 1000, 300_000])
def test_sampling_at_temperature_zero_chooses_the_first_of_the_largest_logits(native: NativeOps, width: int) -> None:
    x = torch.randn(8, width)
    x[1] = 0.0
    x[2] = -torch.inf
    x[3, width // 2] = x[3, -1] = 100.0
    x[4] = torch.arange(width)
    x[5] = torch.nan
    x[6, width // 2] = torch.inf
    x[7, -1] = torch.nan
    expected = [int((row == row.max()).nonzero()[0]) if row.max().isfinite() else NON_FINITE for row in x]
    for temperature in (0.0, 1e-45):
        assert native.sample(x, drawn(*(8 * [(temperature, 5, 0.5, 0.1, 0.9)]))).tolist() == expected


@pytest.mark.parametrize("again", [False, True])
def test_seed_and_position_determine_the_random_number(native: NativeOps, again: bool) -> None:
    """The n-th of 2^22 equal logits is drawn by numbers from n / 2^22 to (n + 1) / 2^22."""
    generator = np.random.default_rng(again)
    width, count = 1 << 22, 6
    seeds = generator.integers(0, 1 << 64, count, np.uint64)
    positions = generator.integers(0, 1 << 20, count)
    sampling = Sampling(np.array([(1.0, 0, 1.0, 0.0)] * count, np.float32), seeds, positions)
    logits, masks = torch.zeros(count, width), dict.fromkeys(range(count), np.full(width // 8, 255, np.uint8))
    tokens = native.sample_masked(logits, masks, sampling) if again else native.sample(logits, sampling).tolist()
    numbers = uniforms(seeds, positions, again)
    assert np.abs(np.array(tokens) - numbers * width).max() < 2


@pytest.mark.parametrize("filters", FILTERS)
def test_sampling_mask_restricts_the_draw_to_the_allowed_tokens(native: NativeOps, filters: Filters) -> None:
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(0, 2.5, (12, 3001)).astype(np.float32))
    logits[:, ::50] = -torch.inf
    masks: dict[int, NDArray[np.uint8]] = {}
    for row, share in ((11, 1.0), (3, 0.5), (4, 0.02), (5, 0.0), (0, 0.0)):
        allowed = generator.random(3008) < share
        allowed[[900, 950] if row == 5 else [3000]] = True  # only impossible tokens, or only the last token
        masks[row] = np.packbits(allowed, bitorder="little")
    sampling = drawn(*((*filters, (row + 0.5) / 12) for row in range(12)), again=True)
    tokens = dict(zip(masks, native.sample_masked(logits, masks, sampling), strict=True))
    for row, mask in masks.items():
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little", count=3001))
        assert tokens[row] in allowed
        if row != 5:
            of_allowed = drawn((*filters, (row + 0.5) / 12))
            assert tokens[row] == allowed[int(native.sample(logits[row, allowed][None], of_allowed))]


def test_logit_adjustments_of_token_ids_outside_the_vocabulary_change_no_memory(native: NativeOps) -> None:
    memory = torch.zeros(3, 16)
    tokens = np.array([16, 17, 2**31 - 1, -3, -(2**31), 5], np.int32)
    adjustments = Adjustments(np.array([0, 6, 6, 6], np.int32), tokens, np.full(6, 9, np.float32))
    assert native.sample(memory[1:2], drawn((0.0, 0, 1, 0, 0), adjustments=adjustments)).tolist() == [5]
    assert not memory.any()


def test_row_has_the_same_log_probabilities_alone_and_in_a_batch(native: NativeOps) -> None:
    logits, tokens = torch.randn(20, 3000), torch.arange(20)
    together = native.log_probabilities(logits, tokens, 5)
    for row in range(20):
        alone = native.log_probabilities(logits[row : row + 1], tokens[row : row + 1], 5)
        of_rows = native.log_probabilities(logits, tokens, 5, np.array([row], np.int32))
        for expected, one, other in zip(together, alone, of_rows, strict=True):
            assert torch.equal(expected[row], one[0])
            assert torch.equal(expected[row], other[0])


@pytest.mark.parametrize("width", [40, 4097, 50_000])
def test_top_log_probabilities_with_equal_logits_list_the_lowest_token_ids_first(native: NativeOps, width: int) -> None:
    logits = torch.randint(0, 6, (4, width)).float()
    logits[1] = 2.0
    logits[2] = -torch.inf
    logits[2, 7] = 1.0
    logits[3] = -torch.arange(width)
    tokens = torch.tensor([0, 1, 2, 3])
    _, ids, values = native.log_probabilities(logits, tokens, 20)
    order = np.lexsort((np.tile(np.arange(width), (4, 1)), -logits.numpy()), axis=1)[:, :20]
    assert ids.tolist() == order.tolist()
    assert torch.isneginf(values[2, 1:]).all()
    assert float(values[2, 0]) == 0


def test_temporary_memory_of_sampling_depends_on_threads_and_not_on_rows(native: NativeOps) -> None:
    width, threads = 150_000, get_num_threads()
    assert native.sampling_bytes(64, width) < (5 * threads + 2 + 1) * width * 4  # and a bit for each masked token
    assert native.sampling_bytes(1, width) >= 5 * width * 4
