"""Log-probabilities of a step: of tokens chosen on the device, and of tokens redrawn by the host."""

import pytest
import torch

from helexa.neuron.engine.step_output_logprobs_and_pooling import Logprobs
from helexa.neuron.ops.kernel_header import NON_FINITE
from helexa.neuron.ops.reference.reference_ops import ReferenceOps

OPS = ReferenceOps(torch.device("cpu"), torch.float32)


def test_log_probabilities_are_returned_only_for_requested_rows_and_counts() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0], [2.0, 1.0, 0.0], [4.0, 4.0, 9.0]])
    expected = torch.log_softmax(logits, dim=-1)
    logprobs = Logprobs(OPS, logits, {0: 2, 2: 0, 3: 1}, torch.tensor([0, 1, 1, NON_FINITE]))
    logits.zero_()  # the next step may overwrite the logits
    logprobs_by_row = logprobs.read([0, 1, 1, NON_FINITE])
    assert set(logprobs_by_row) == {0, 2}
    assert logprobs_by_row[0][0] == pytest.approx(float(expected[0, 0]))
    assert [token for token, _ in logprobs_by_row[0][1]] == [2, 1]
    assert [value for _, value in logprobs_by_row[0][1]] == pytest.approx(expected[0, [2, 1]].tolist())
    assert logprobs_by_row[2][0] == pytest.approx(float(expected[2, 1]))
    assert logprobs_by_row[2][1] == []


def test_replacement_of_a_sampled_token_gets_its_own_log_probability() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0]])
    logprobs = Logprobs(OPS, logits, {0: 1, 1: 1}, torch.tensor([2, 1]))
    logprobs_by_row = logprobs.read([2, 0])
    assert [logprobs_by_row[row][0] for row in (0, 1)] == pytest.approx(
        torch.log_softmax(logits, -1)[[0, 1], [2, 0]].tolist()
    )
