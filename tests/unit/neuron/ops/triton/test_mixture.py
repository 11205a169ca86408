"""The fused Triton mixture of experts compared with computing one expert after another."""

from itertools import product

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.expert_routing_and_mixture import Clamp, Expert, Mixture, Routing
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from helexa.neuron.ops.triton.mixture import GpuMixture, arrange, few, route
from neuron.ops import random_weights
from nightly import daily

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # from numpy, in the interpreter

CPU = torch.device("cpu")
HIDDEN, WIDE, COUNT = 32, 32, 4
ROUTINGS = [Routing(2, "shares"), Routing(2, "normalized"), Routing(1, "scores"), Routing(COUNT, "shares")]
FORMS = [
    ("Q4_0", "Q4_0", "Q8_0"),
    ("bfloat16",) * 3,
    ("Q4_1", "Q5_0", "Q4_0"),
    ("bfloat16", "bfloat16", "Q4_0"),
]


@pytest.fixture
def ops() -> GpuOps:
    torch.manual_seed(0)
    return GpuOps(CPU, torch.float32)


def experts(ops: GpuOps, formats: tuple[str, ...], *, biased: bool = False) -> list[Expert]:
    """Experts whose gate, up and down matrices have the given `formats`."""
    shapes = ((WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE))
    built: list[Expert] = []
    for _ in range(COUNT):
        gate, up, down = (
            ops.matrix(random_weights.make(name, *shape)) for name, shape in zip(formats, shapes, strict=True)
        )
        biases = (torch.randn(2 * WIDE), torch.randn(HIDDEN)) if biased else (None, None)
        built.append(Expert((gate, up), down, *biases))
    return built


def one_by_one(ops: GpuOps, layer_experts: list[Expert], routing: Routing, clamp: Clamp | None = None) -> Mixture:
    """Return the same mixture computed one expert at a time, in plain torch and float64."""

    def product(matrices: list[Tensor], bias: Tensor | None, x: Tensor) -> Tensor:
        weight = torch.cat([ops.dense(matrix) for matrix in matrices]).double()
        return x @ weight.T + (0 if bias is None else bias.double())

    def gated(x: Tensor) -> Tensor:
        return ops.gate_mul(x, "silu")

    gate_ups = [lambda x, e=e: product([*e.gate_up], e.gate_up_bias, x.double()) for e in layer_experts]
    downs = [lambda x, e=e: product([e.down], e.down_bias, x).float() for e in layer_experts]
    return Mixture(routing, gate_ups, downs, clamp, gated, lambda out: out)


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    """Rows and router scores. Scores differ clearly, and expert 3 always has the lowest."""
    scores = torch.stack([torch.randperm(COUNT).float() for _ in range(rows)])
    scores[:, 3] = -1
    return torch.randn(rows, HIDDEN) / 8, scores


def near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("formats", "rows"), daily(list(zip(FORMS, (1, 5, 1, 5), strict=True)), product(FORMS, (1, 5)), several=True)
)
def test_mixture_of_experts_matches_a_computation_expert_by_expert(
    ops: GpuOps, formats: tuple[str, ...], rows: int
) -> None:
    layer_experts, routing, (x, scores) = experts(ops, formats), ROUTINGS[1], inputs(rows)
    mixture = ops.mixture(layer_experts, routing)
    assert isinstance(mixture, GpuMixture)
    near(mixture(x, scores), one_by_one(ops, layer_experts, routing)(x, scores))


@pytest.mark.parametrize("rows", [5, 40])
def test_mixture_in_half_precision_with_larger_tiles_matches_expert_by_expert(rows: int) -> None:
    torch.manual_seed(0)
    ops = GpuOps(CPU, torch.float16)
    layer_experts, routing, (x, scores) = experts(ops, FORMS[1]), ROUTINGS[1], inputs(rows)
    result = ops.mixture(layer_experts, routing)(x.half(), scores.half())
    expected = one_by_one(ops, layer_experts, routing)(x.half().float(), scores)
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=4e-3 * expected.abs().max().item())


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("clamp", [None, Clamp(1.702, 7.0), Clamp(2.0, 0.5)], ids=str)
def test_mixture_with_biases_and_clamp_matches_a_computation_expert_by_expert(
    ops: GpuOps, clamp: Clamp | None, rows: int
) -> None:
    layer_experts, routing, (x, scores) = experts(ops, FORMS[1], biased=True), Routing(2, "scores"), inputs(rows)
    near(
        ops.mixture(layer_experts, routing, clamp)(x, scores), one_by_one(ops, layer_experts, routing, clamp)(x, scores)
    )


def test_experts_of_different_formats_are_computed_one_by_one_with_equal_results(ops: GpuOps) -> None:
    layer_experts = [*experts(ops, FORMS[0])[:-1], experts(ops, ("Q8_0", "bfloat16", "Q4_1"))[-1]]
    x, scores = inputs(2)
    near(ops.mixture(layer_experts, ROUTINGS[0])(x, scores), one_by_one(ops, layer_experts, ROUTINGS[0])(x, scores))


@pytest.mark.parametrize("rows", [2, 12])
def test_row_of_a_mixture_does_not_depend_on_other_rows(ops: GpuOps, rows: int) -> None:
    routing, (x, scores) = Routing(2, "normalized"), inputs(rows)
    mixture = ops.mixture(experts(ops, FORMS[1]), routing)
    together = mixture(x, scores)
    half = rows // 2
    assert few(2 * rows, COUNT, 2) == few(2 * half, COUNT, 2) or rows == 2
    for some in (slice(0, half), slice(half, rows)) if rows > 2 else ():
        assert torch.equal(mixture(x[some], scores[some]), together[some])
    if rows == 2:  # a single row uses other kernels
        near(torch.cat([mixture(x[row : row + 1], scores[row : row + 1]) for row in range(rows)]), together)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("experts", [4, 128])
def test_experts_with_the_highest_router_scores_are_chosen(routing: Routing, experts: int) -> None:
    torch.manual_seed(0)
    scores = torch.stack([torch.randperm(experts).float() for _ in range(5)]) / 8
    chosen, weights = route(scores, routing)
    expected, shares = routing(scores)
    assert torch.equal(chosen.long(), expected)
    torch.testing.assert_close(weights, shares)


def test_equal_router_scores_choose_the_first_experts() -> None:
    scores = torch.tensor([[0.0] * 5, [0.0, 1.0, 0.0, 1.0, 0.0], [-float("inf")] * 4 + [0.0]])
    assert route(scores, Routing(3, "scores"))[0].tolist() == [[0, 1, 2], [1, 3, 0], [4, 0, 1]]


@pytest.mark.filterwarnings("ignore:invalid value")  # from numpy, in the interpreter
def test_non_finite_router_scores_choose_existing_experts(ops: GpuOps) -> None:
    for bad in (float("nan"), float("inf")):
        for weights in ("shares", "normalized", "scores"):
            scores = torch.tensor([[0.0, bad, 2.0, 1.0, -1.0], [bad] * 5, [0.0, 1.0, 2.0, 3.0, 4.0]])
            chosen, shares = route(scores, Routing(3, weights))
            assert all(len(set(row)) == 3 and max(row) < 5 for row in chosen.tolist())
            assert shares.isfinite().all(1).tolist() == [False, False, True]
    x, scores = inputs(4)
    scores[2, 1] = float("nan")
    result = ops.mixture(experts(ops, FORMS[1]), Routing(2, "scores"))(x, scores)
    assert result.isfinite().all(1).tolist() == [row != 2 for row in range(4)]


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("pairs", [1, 7, 1100])
def test_row_blocks_of_a_mixture_cover_all_rows_and_each_has_one_expert(pairs: int, rows: int) -> None:
    torch.manual_seed(0)
    for experts, chosen in ((5, torch.randint(0, 5, (pairs,))), (3, torch.ones(pairs))):
        blocks = arrange(chosen.int(), experts, rows)
        pairs_in_blocks: list[int] = []
        for expert, first, end in blocks.bounds.T.tolist():
            block = blocks.order[first:end].tolist()
            assert len(block) <= rows
            assert all(chosen[pair] == expert for pair in block)
            pairs_in_blocks += block
        assert sorted(pairs_in_blocks) == list(range(pairs))
        assert pairs_in_blocks == chosen.argsort(stable=True).tolist()


def test_reported_bytes_per_step_of_a_mixture_count_only_the_chosen_experts(ops: GpuOps) -> None:
    ops.mixture(experts(ops, ("Q4_0",) * 3), Routing(2, "shares"))
    assert ops.step_bytes == 3 * HIDDEN * WIDE * 4.5 / 8 * 2


def test_mixture_of_no_rows_is_empty(ops: GpuOps) -> None:
    mixture = ops.mixture(experts(ops, FORMS[1]), Routing(2, "shares"))
    assert mixture(torch.empty(0, HIDDEN), torch.empty(0, COUNT)).shape == (0, HIDDEN)
