"""Tokens chosen by kernels compared with tokens that plain torch chooses from the same logits."""

import numpy as np
import pytest
import torch

from helexa.neuron.ops.kernel_header import NON_FINITE
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.triton import sampling as kernels
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from neuron.ops.drawn_rows import drawn

CPU = torch.device("cpu")
GPU, PLAIN = GpuOps(CPU, torch.float32), ReferenceOps(CPU, torch.float32)
OFF = (0, 1.0, 0.0)
CUTS = [(20, 0.95, 0.0), (3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (50, 0.4, 0.4), (0, 1e-6, 0.0)]


def spread(cut: tuple[int, float, float], temperature: float = 0.8, count: int = 4) -> list[tuple[float, ...]]:
    return [(temperature, *cut, (i + 0.37) / count) for i in range(count)]


@pytest.mark.parametrize("vocabulary", [5, 3000])
def test_sampled_tokens_match_those_of_plain_torch(vocabulary: int) -> None:
    rows = [(0.0, *OFF, 0.0), *spread(OFF), *spread(OFF, 0.01, 1)]
    for cut in CUTS:
        rows += spread(cut, count=1)
    logits = 4 * torch.randn(len(rows), vocabulary)
    chosen_settings = drawn(*rows)
    assert torch.equal(GPU.sample(logits, chosen_settings), PLAIN.sample(logits, chosen_settings))


def test_sampling_with_more_candidates_than_one_pass_covers_matches_torch() -> None:
    logits = torch.rand(2, 4000)
    chosen_settings = drawn((1.0, 0, 0.97, 0.0, 0.6), (1.0, 3000, 1.0, 0.0, 0.77))
    assert torch.equal(GPU.sample(logits, chosen_settings), PLAIN.sample(logits, chosen_settings))


def test_pointers_passed_to_sampling_kernels_are_aligned_for_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *arguments, **constants: given.extend(arguments))
    GPU.sample(torch.zeros(1, 2100), drawn(*spread((20, 0.95, 0.0), count=1)))
    places = [argument.data_ptr() for argument in given if isinstance(argument, torch.Tensor)]
    assert len(places) > 8
    assert all(place % 16 == 0 for place in places), "others have kernels of their own to be compiled"


def test_filters_keep_equal_logits_together_and_argmax_takes_the_first_of_them() -> None:
    logits = torch.full((4, 40), -9.0)
    logits[:, [7, 21, 30]] = 2.0
    logits[:, [3, 39]] = 1.0
    chosen_settings = drawn(
        (0.0, *OFF, 0.0), *((1.0, 2, 1.0, 0.0, share) for share in (0.4, 0.999)), (1.0, 4, 0.99, 0.0, 0.5)
    )
    assert GPU.sample(logits, chosen_settings).tolist() == [
        7,
        21,
        30,
        PLAIN.sample(logits, chosen_settings).tolist()[-1],
    ]


def test_rows_with_non_finite_logits_do_not_affect_sampling_of_other_rows() -> None:
    logits = torch.randn(8, 1500)
    chosen_settings = drawn(
        *((t, k, 1.0, 0.0, 0.5) for t, k in ((0, 0), (1, 0), (1, 3), (0, 0), (1, 3), (0, 0), (1, 5), (1, 0)))
    )
    expected = GPU.sample(logits, chosen_settings)
    for row, value in ((3, "nan"), (4, "nan"), (5, "inf"), (6, "-inf")):
        logits[row] = float(value)
    logits[7, 1499] = float("nan")
    expected[3:] = NON_FINITE
    assert torch.equal(GPU.sample(logits, chosen_settings), expected)


def test_tokens_with_logit_minus_infinity_are_never_sampled() -> None:
    logits = torch.full((3, 2100), float("-inf"))
    logits[:, [5, 2050]] = 0.0
    chosen_settings = drawn((1.0, *OFF, 0.99999997), (1.0, 50, 1.0, 0.0, 0.99999997), (1.0, 0, 0.99, 0.0, 0.0))
    assert GPU.sample(logits, chosen_settings).tolist() == [2050, 2050, 5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_grammar_masks_are_applied_before_sampling(dtype: torch.dtype) -> None:
    vocabulary = 1030
    logits = torch.randn(3, vocabulary).to(dtype)
    allowed = np.random.default_rng(1).random((2, vocabulary + 18)) < 0.05
    masks = {2: np.packbits(allowed[0], bitorder="little"), 0: np.packbits(allowed[1], bitorder="little")}
    chosen_settings = drawn((0.9, *OFF, 0.6), (0.0, *OFF, 0.0), (0.0, *OFF, 0.0), again=True)
    masked = kernels.masked(logits, masks)
    for row, place, may in ((0, 2, allowed[0]), (1, 0, allowed[1])):
        may = torch.from_numpy(may[:vocabulary])
        assert torch.equal(masked[row], torch.where(may, logits[place], float("-inf")))
    assert GPU.sample_masked(logits, masks, chosen_settings) == PLAIN.sample_masked(logits, masks, chosen_settings)
