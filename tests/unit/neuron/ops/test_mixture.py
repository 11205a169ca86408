"""The fused native mixture of experts compared with computing one expert after another."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helexa.neuron.ops.expert_routing_and_mixture import Clamp, Expert, Routing
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.native.mixture import NativeMixture
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from neuron.ops import random_weights

HIDDEN, WIDE, COUNT = 256, 512, 20
ROWS = 40
ALIKE = ("Q4_0", "Q4_0", "Q4_0")
MIXED = [("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q8_0", "bfloat16"), ("Q8_0", "bfloat16", "Q4_1")]
ROUTINGS = [Routing(4, "shares"), Routing(4, "normalized"), Routing(1, "scores"), Routing(COUNT, "shares")]


def experts(native: NativeOps, formats: tuple[str, str, str], *, biased: bool = False) -> list[Expert]:
    """Experts whose gate, up and down matrices have the given `formats`."""
    shapes = ((WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE))
    built: list[Expert] = []
    for _ in range(COUNT):
        gate, up, down = (
            native.matrix(random_weights.make(name, *shape)) for name, shape in zip(formats, shapes, strict=True)
        )
        biases = (torch.randn(2 * WIDE), torch.randn(HIDDEN)) if biased else (None, None)
        built.append(Expert((gate, up), down, *biases))
    return built


def inputs() -> tuple[Tensor, Tensor]:
    """Rows and router scores. Scores differ clearly, and expert 3 always has the lowest."""
    scores = torch.stack([torch.randperm(COUNT).float() for _ in range(ROWS)])
    scores[:, 3] = -1
    return torch.randn(ROWS, HIDDEN) / 8, scores


def near(actual: Tensor, expected: Tensor) -> None:
    """Assert equality within the rounding of weights and sums."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize(
    "formats", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q8_0", "bfloat16"), ("Q8_0", "bfloat16", "Q4_1")]
)
def test_mixture_of_experts_matches_a_computation_expert_by_expert(
    native: NativeOps, routing: Routing, formats: tuple[str, str, str]
) -> None:
    layer_experts = experts(native, formats)
    assert NativeMixture.fits(layer_experts)
    x, scores = inputs()
    expected = Ops.mixture(native, layer_experts, routing)(x, scores)
    near(native.mixture(layer_experts, routing)(x, scores), expected)


@pytest.mark.parametrize("clamp", [None, Clamp(1.702, 7.0), Clamp(2.0, 0.5)], ids=str)
def test_mixture_with_biases_and_clamp_matches_a_computation_expert_by_expert(
    native: NativeOps, clamp: Clamp | None
) -> None:
    layer_experts, routing = experts(native, ALIKE, biased=True), Routing(4, "scores")
    x, scores = inputs()
    expected = Ops.mixture(native, layer_experts, routing, clamp)(x, scores)
    near(native.mixture(layer_experts, routing, clamp)(x, scores), expected)


def test_experts_of_different_formats_are_computed_one_by_one_with_equal_results(native: NativeOps) -> None:
    layer_experts = [
        *experts(native, ALIKE)[:-1],
        experts(native, ("Q8_0", "Q8_0", "Q8_0"))[-1],
    ]
    assert not NativeMixture.fits(layer_experts)
    x, scores = inputs()
    expected = Ops.mixture(native, layer_experts, ROUTINGS[0])(x, scores)
    assert torch.equal(native.mixture(layer_experts, ROUTINGS[0])(x, scores), expected)


@pytest.mark.parametrize("formats", MIXED, ids="-".join)
def test_row_of_a_mixture_does_not_depend_on_the_number_of_rows(
    native: NativeOps, formats: tuple[str, str, str]
) -> None:
    mixture = native.mixture(experts(native, formats), Routing(4, "normalized"), Clamp(1.702, 7.0))
    x, scores = inputs()
    together = mixture(x, scores).clone()
    for first, end in ((0, 1), (0, 2), (7, 8), (3, 20), (13, ROWS)):
        assert torch.equal(mixture(x[first:end].contiguous(), scores[first:end].contiguous()), together[first:end])


def test_equal_router_scores_choose_the_first_experts(native: NativeOps) -> None:
    layer_experts, x = experts(native, ALIKE), inputs()[0]
    alike, untied = torch.zeros(ROWS, COUNT), torch.zeros(ROWS, COUNT)
    untied[:, 3:] = -0.001
    alike[:, 5] = untied[:, 5] = 1.0
    chosen = native.mixture(layer_experts, Routing(4, "scores"))
    assert torch.equal(chosen(x, alike), chosen(x, untied))


def test_native_add_gated_equals_plain_torch(native: NativeOps) -> None:
    out, x, gate = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN), torch.linspace(-100, 100, ROWS)[:, None]
    expected = ReferenceOps(torch.device("cpu"), torch.float32).add_gated(out.clone(), x, gate)
    torch.testing.assert_close(native.add_gated(out, x, gate), expected)


class NoFloat64(TorchFunctionMode):
    """Rejects float64, as MPS does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return result


def test_add_gated_uses_no_float64_because_mps_lacks_it() -> None:
    out, x, gate = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN), torch.linspace(-100, 100, ROWS)[:, None]
    expected = ReferenceOps(torch.device("cpu"), torch.float32).add_gated(out.clone(), x, gate)
    with NoFloat64():
        added = ReferenceOps(torch.device("mps"), torch.float32).add_gated(out, x, gate)
    torch.testing.assert_close(added, expected)
