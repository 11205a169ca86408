"""The log-probabilities of a prompt's own tokens, computed along with the prompt."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.engine.step.readback import Readback
from helexa.neuron.engine.step.step_input import HiddenRows

MOST_ROWS = 64
"""Rows of logits that exist at a time: a whole chunk of a prompt has a hundred times the size of its hidden states."""


@dataclass(frozen=True)
class ScoresReadback:
    """Scores of one sequence on their way to the host.

    Attributes:
        own: float32 [R], the log-probabilities of the prompt's tokens.
        ids, values: [R, alternatives], the likeliest tokens in their places, the likeliest first.
    """

    own: Readback
    ids: Readback
    values: Readback

    def wait(self) -> list[Logprob]:
        """Return the scores, in the prompt's order."""
        own, ids, values = (part.wait().tolist() for part in (self.own, self.ids, self.values))
        tops = [list(zip(*top, strict=True)) for top in zip(ids, values, strict=True)]
        return list(zip(own, tops, strict=True))


def begin_scores(
    rows: list[HiddenRows], hidden: Tensor | None, head: Callable[[Tensor], Tensor], most_rows: int = MOST_ROWS
) -> dict[int, ScoresReadback]:
    """Compute the scores that a step yields, by sequence id.

    Args:
        hidden: [P, H], the hidden states that `rows` are about, if any.
        head: hidden states to logits.
        most_rows: rows of logits that may exist at a time.
    """
    scores: dict[int, ScoresReadback] = {}
    if hidden is None:
        return scores
    for part, own in zip(rows, hidden.split([part.count for part in rows]), strict=True):
        if part.followers is not None:
            followers = torch.from_numpy(part.followers).to(hidden.device, torch.int64)
            scored = zip(*_scored(own, followers, head, part.alternatives, most_rows), strict=True)
            scores[part.sequence] = ScoresReadback(*(Readback(torch.cat(one)) for one in scored))
    return scores


def are_finite(scores: list[Logprob]) -> bool:
    """Whether the logits were finite numbers."""
    return all(math.isfinite(own) for own, _ in scores)


def _scored(
    hidden: Tensor, followers: Tensor, head: Callable[[Tensor], Tensor], alternatives: int, most_rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for rows, tokens in zip(hidden.split(most_rows), followers.split(most_rows), strict=True):
        table = torch.log_softmax(head(rows).float(), dim=-1)
        top = table.topk(min(alternatives, table.shape[1]))
        yield table.gather(1, tokens.unsqueeze(1)).squeeze(1), top.indices, top.values
