"""Log-probabilities of a step: of what was chosen on the device, and of what was chosen instead."""

import pytest
import torch

from helexa.neuron.engine.sampling.logprobs import Logprobs
from helexa.neuron.ops.constants import NON_FINITE


def test_only_rows_that_ask_and_as_many_as_they_ask_for() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0], [2.0, 1.0, 0.0], [4.0, 4.0, 9.0]])
    expected = torch.log_softmax(logits, dim=-1)
    logprobs = Logprobs(logits, {0: 2, 2: 0, 3: 1})
    logits.zero_()  # the sampler may change them
    logprobs.begin(torch.tensor([0, 1, 1, NON_FINITE]))
    told = logprobs.of([0, 1, 1, NON_FINITE])
    assert set(told) == {0, 2}
    assert told[0][0] == pytest.approx(float(expected[0, 0]))
    assert [token for token, _ in told[0][1]] == [2, 1]
    assert [value for _, value in told[0][1]] == pytest.approx(expected[0, [2, 1]].tolist())
    assert told[2][0] == pytest.approx(float(expected[2, 1]))
    assert told[2][1] == []


def test_a_token_that_was_chosen_instead_has_its_own() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0]])
    logprobs = Logprobs(logits, {0: 1, 1: 1})
    logprobs.begin(torch.tensor([2, 1]))
    told = logprobs.of([2, 0])
    assert [told[row][0] for row in (0, 1)] == pytest.approx(torch.log_softmax(logits, -1)[[0, 1], [2, 0]].tolist())
