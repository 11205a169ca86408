"""The gated delta rule compared with its definition in float64, and with transformers on ordinary inputs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as transformers_form

from helexa.neuron.ops.convolution import convolve
from helexa.neuron.ops.gated_delta import CHUNK, chunked, log_decay, recurrent

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 16, 24
FORMS = [recurrent, chunked]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the delta rule in float64, token by token; return the outputs and the final state."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    out = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1), state


def ordinary(count: int, sequences: int = 1) -> Inputs:
    q, k = torch.randn(2, sequences, count, KEY_HEADS, KEY)
    v = torch.randn(sequences, count, HEADS, VALUE)
    return q, k, v, -torch.rand(sequences, count, HEADS), torch.rand(sequences, count, HEADS)


def identical_keys(count: int) -> Inputs:
    q, k, v, g, beta = ordinary(count)
    return q, k[:, :1].expand_as(k), v, torch.zeros_like(g), torch.ones_like(beta)


def nearly_identical_keys(count: int) -> Inputs:
    q, k, v, g, beta = ordinary(count)
    return q, k[:, :1] + 1e-3 * k, v, -1e-6 * torch.rand_like(g), 1 - 1e-4 * beta


def opposite_keys(count: int) -> Inputs:
    q, k, v, g, beta = identical_keys(count)
    sign = 1.0 - 2.0 * (torch.arange(count) % 2)
    return q, k * sign[:, None, None], v, g, beta


def nothing_forgotten(count: int) -> Inputs:
    q, k, v, g, beta = ordinary(count)
    return q, k, v, torch.zeros_like(g), torch.ones_like(beta)


def everything_forgotten(count: int) -> Inputs:
    q, k, v, g, beta = ordinary(count)
    return q, k, v, g * 1e4, beta


def now_and_then_forgotten(count: int) -> Inputs:
    q, k, v, g, beta = nearly_identical_keys(count)
    g = torch.where(torch.rand_like(g) < 0.05, -2e4, g * 1e3)
    return q, k, v, g, beta


def forgotten_for_good(count: int) -> Inputs:
    q, k, v, g, beta = ordinary(count)
    return q, k, v, torch.where(torch.rand_like(g) < 0.1, -torch.inf, g), beta


def repetition(count: int) -> Inputs:
    again = torch.arange(count) % 7
    q, k, v, _, _ = (x[:, again] for x in ordinary(7))
    return q, k, v, torch.full((1, count, HEADS), -1e-4), torch.full((1, count, HEADS), 0.999)


def tiny(count: int) -> Inputs:
    q, k, v, g, beta = ordinary(count)
    return q * 1e-6, k * 1e-3, v * 1e-20, g, beta


def huge(count: int) -> Inputs:
    q, k, v, g, beta = ordinary(count)
    return q * 1e15, k * 1e15, v * 1e25, g, beta


def zeros(count: int) -> Inputs:
    q, k, v, g, beta = ordinary(count)
    return q * 0, k * 0, v * 0, g * 0, beta * 0


HARD = {make.__name__: make for make in (identical_keys, nearly_identical_keys, opposite_keys, nothing_forgotten)}
HARD |= {make.__name__: make for make in (everything_forgotten, now_and_then_forgotten, forgotten_for_good)}
HARD |= {make.__name__: make for make in (repetition, tiny, huge, zeros)}


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("form", FORMS)
def test_both_delta_rule_algorithms_match_transformers(form: Callable[..., Tensor], count: int) -> None:
    inputs, state = ordinary(count, sequences=3), torch.randn(3, HEADS, KEY, VALUE)
    for reference in (
        transformers_form.torch_recurrent_gated_delta_rule,
        transformers_form.torch_chunk_gated_delta_rule,
    ):
        initial = state.clone()
        out = form(*inputs, initial)
        expected, expected_state = reference(
            *inputs, initial_state=state.clone(), output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(initial, expected_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HARD)
def test_delta_rule_with_extreme_inputs_matches_float64(name: str, form: Callable[..., Tensor]) -> None:
    inputs = HARD[name](400)
    for state in (torch.zeros(1, HEADS, KEY, VALUE), torch.randn(1, HEADS, KEY, VALUE) * inputs[2].abs().mean()):
        expected, expected_state = definition(*inputs, state)
        near(form(*inputs, state), expected)
        near(state, expected_state)


@pytest.mark.parametrize("name", ["repetition", "nearly_identical_keys", "now_and_then_forgotten"])
def test_delta_rule_over_thousands_of_tokens_matches_float64(name: str) -> None:
    inputs, state = HARD[name](4000), torch.zeros(1, HEADS, KEY, VALUE)
    expected, expected_state = definition(*inputs, state)
    for start in range(0, 4000, 1000):
        near(chunked(*(x[:, start : start + 1000] for x in inputs), state), expected[:, start : start + 1000])
    near(state, expected_state)


@pytest.mark.parametrize("first", FORMS)
def test_delta_rule_state_continues_after_any_number_of_tokens(first: Callable[..., Tensor]) -> None:
    count = 2 * CHUNK + 2
    inputs, final_state = ordinary(count), torch.zeros(1, HEADS, KEY, VALUE)
    expected = chunked(*inputs, final_state)
    for split in range(1, count):
        state = torch.zeros(1, HEADS, KEY, VALUE)
        first_rows = first(*(x[:, :split] for x in inputs), state)
        last_rows = chunked(*(x[:, split:] for x in inputs), state)
        torch.testing.assert_close(torch.cat((first_rows, last_rows), dim=1), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, final_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_convolution_matches_transformers(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 20, 12).to(dtype), torch.randn(4, 12)
    state = torch.zeros(2, 3, 12, dtype=dtype)
    expected = transformers_form.causal_conv1d_fn(x.float().transpose(1, 2), weight.T, activation="silu")
    out = F.silu(convolve(x, weight, state))
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)
    assert torch.equal(state, x[:, -3:])


def test_short_convolution_continues_after_any_number_of_tokens() -> None:
    x, weight = torch.randn(1, 12, 8), torch.randn(4, 8)
    expected = convolve(x, weight, torch.zeros(1, 3, 8))
    for split in range(1, 12):
        state = torch.zeros(1, 3, 8)
        out = [convolve(x[:, :split], weight, state), convolve(x[:, split:], weight, state)]
        torch.testing.assert_close(torch.cat(out, dim=1), expected)


def test_decay_of_the_delta_rule_matches_its_formula_and_is_at_most_1() -> None:
    a = torch.cat((torch.randn(40, HEADS) * 10, torch.tensor([[-1e4], [1e4], [0.0]]).expand(3, HEADS)))
    rate, bias = torch.tensor([-5.0, 0.0, 1.0, 2.8]).exp(), torch.randn(HEADS)
    g = log_decay(a, rate, bias)
    expected = -rate.double() * F.softplus(a.double() + bias.double())
    torch.testing.assert_close(g.double(), expected, rtol=1e-5, atol=1e-7)
    assert (g <= 0).all()


def near(actual: Tensor, expected: Tensor) -> None:
    """Assert equality within the error of float32 sums whose terms are as large as the largest expected value."""
    assert torch.isfinite(actual).all()
    size = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5 * size)
