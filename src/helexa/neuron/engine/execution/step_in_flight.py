"""A launched step, whose results are read later."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from helexa.neuron.engine.sampling.logprobs import Logprobs
from helexa.neuron.engine.sampling.sampler import Refused, Sampled
from helexa.neuron.engine.step.prompt_scores import ScoresReadback
from helexa.neuron.engine.step.readback import Readback
from helexa.neuron.engine.step.step_input import HiddenRows
from helexa.neuron.engine.step.step_output import StepOutput


@dataclass(frozen=True)
class StepInFlight:
    """A launched step, whose results the device may still be computing.

    Attributes:
        sampled: the sampled tokens; None if no sequence samples.
        logprobs: log-probabilities of the sampled tokens.
        hidden: sums of hidden states for embeddings, the result of `begin_sums`.
        scores: log-probabilities of prompt tokens, the result of `begin_scores`.
    """

    sampled: Sampled | None = None
    logprobs: Logprobs | None = None
    hidden: Mapping[int, Readback] = field(default_factory=dict[int, Readback])
    scores: Mapping[int, ScoresReadback] = field(default_factory=dict[int, ScoresReadback])

    @torch.inference_mode()
    def read(self, refused: Refused | None = None) -> StepOutput:
        """Wait for this step, not for steps launched later, and return its output.

        Args:
            refused: function that returns masks for tokens that a grammar rejects; None accepts all tokens.
        """
        sums = {number: copy.wait().numpy() for number, copy in self.hidden.items()}
        scores = {number: copy.wait() for number, copy in self.scores.items()}
        if self.sampled is None or self.logprobs is None:
            return StepOutput([], hidden=sums, scores=scores)
        tokens = self.sampled.read(refused)
        return StepOutput(tokens, self.logprobs.read(tokens), sums, scores)


def begin_sums(rows: list[HiddenRows], hidden: Tensor | None) -> dict[int, Readback]:
    """Sum hidden states for embeddings in float32, and start to copy the sums to the host; return them by sequence id.

    Args:
        rows: the sequences to which the rows of `hidden` belong.
        hidden: [P, H], hidden states after the last norm; None if P is 0.
    """
    if hidden is None:
        return {}
    pairs = zip(rows, hidden.split([entry.count for entry in rows]), strict=True)
    return {entry.sequence: Readback(states.float().sum(0)) for entry, states in pairs if entry.followers is None}
