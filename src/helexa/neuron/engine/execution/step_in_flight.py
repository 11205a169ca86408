"""A step in flight: a step that was launched and whose results have not been read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from helexa.neuron.engine.sampling.logprobs import Logprobs
from helexa.neuron.engine.sampling.step_sampler import RejectionMasks, Sampled
from helexa.neuron.engine.step.prompt_scores import ScoresReadback
from helexa.neuron.engine.step.readback import Readback
from helexa.neuron.engine.step.step_input import HiddenRows
from helexa.neuron.engine.step.step_output import StepOutput


@dataclass(frozen=True)
class StepInFlight:
    """A step that was launched. The device may still be computing its results.

    Attributes:
        sampled: the sampled tokens; None if the step samples no tokens.
        logprobs: log-probabilities of the sampled tokens; None if the step samples no tokens.
        hidden: sums of hidden states for embeddings by sequence id, from `begin_sums`.
        scores: log-probabilities of prompt tokens by sequence id, from `begin_scores`.
    """

    sampled: Sampled | None = None
    logprobs: Logprobs | None = None
    hidden: Mapping[int, Readback] = field(default_factory=dict[int, Readback])
    scores: Mapping[int, ScoresReadback] = field(default_factory=dict[int, ScoresReadback])

    @torch.inference_mode()
    def read(self, rejection_masks: RejectionMasks | None = None) -> StepOutput:
        """Wait for the results of this step, but not for steps launched later. Return the step's output.

        Args:
            rejection_masks: function that returns masks of the allowed tokens for rows whose token a grammar rejects.
                None accepts all tokens.
        """
        sums = {number: copy.wait().numpy() for number, copy in self.hidden.items()}
        scores = {number: copy.wait() for number, copy in self.scores.items()}
        if self.sampled is None or self.logprobs is None:
            return StepOutput([], hidden=sums, scores=scores)
        tokens = self.sampled.read(rejection_masks)
        return StepOutput(tokens, self.logprobs.read(tokens), sums, scores)


def begin_sums(rows: list[HiddenRows], hidden: Tensor | None) -> dict[int, Readback]:
    """Launch the summation of hidden states for embeddings, and the copy of the float32 sums to the host.

    Args:
        rows: the rows of `hidden` that belong to each sequence.
        hidden: [P, H], hidden states of P rows after the last norm (H: hidden size); None if P is 0.

    Returns:
        The pending copies by sequence id, for sequences that need an embedding.
    """
    if hidden is None:
        return {}
    pairs = zip(rows, hidden.split([entry.count for entry in rows]), strict=True)
    return {entry.sequence: Readback(states.float().sum(0)) for entry, states in pairs if entry.followers is None}
