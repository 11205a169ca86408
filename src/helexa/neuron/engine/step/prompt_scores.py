"""Computes prompt scores during prefill: the log-probability of each prompt token, given the tokens before it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.engine.step.readback import Readback
from helexa.neuron.engine.step.step_input import HiddenRows

MOST_ROWS = 64
"""Maximum rows of logits in memory. Logits take about 100 times as much memory as hidden states."""


@dataclass(frozen=True)
class ScoresReadback:
    """The prompt scores (log-probabilities of prompt tokens) of one sequence in one step.

    The device may still be copying them to the host.

    Attributes:
        logprobs: float32 [R], the log-probabilities of R prompt tokens.
        ids: int64 [R, alternatives], the likeliest tokens at the position of each prompt token, the likeliest first.
        values: float32 [R, alternatives], the log-probabilities of the tokens `ids`.
    """

    logprobs: Readback
    ids: Readback
    values: Readback

    def wait(self) -> list[Logprob]:
        """Wait for the copies to the host, and return the scores in the order of the prompt."""
        logprobs, ids, values = (copy.wait().tolist() for copy in (self.logprobs, self.ids, self.values))
        tops = [list(zip(*top, strict=True)) for top in zip(ids, values, strict=True)]
        return list(zip(logprobs, tops, strict=True))


def begin_scores(
    rows: list[HiddenRows], hidden: Tensor | None, head: Callable[[Tensor], Tensor], most_rows: int = MOST_ROWS
) -> dict[int, ScoresReadback]:
    """Launch the computation of a step's prompt scores (log-probabilities of prompt tokens) without waiting.

    Args:
        rows: the rows of `hidden` that belong to each sequence.
        hidden: [P, H], hidden states of P rows after the last norm (H: hidden size); None if P is 0.
        head: function that maps hidden states to logits.
        most_rows: maximum number of rows of logits in memory at a time.

    Returns:
        The pending scores by sequence id, for sequences that request them.
    """
    scores: dict[int, ScoresReadback] = {}
    if hidden is None:
        return scores
    for entry, states in zip(rows, hidden.split([entry.count for entry in rows]), strict=True):
        if entry.followers is not None:
            next_tokens = torch.from_numpy(entry.followers).to(hidden.device, torch.int64)
            tensors_by_field = zip(*_scored(states, next_tokens, head, entry.alternatives, most_rows), strict=True)
            scores[entry.sequence] = ScoresReadback(*(Readback(torch.cat(tensors)) for tensors in tensors_by_field))
    return scores


def are_finite(scores: list[Logprob]) -> bool:
    """Return whether no log-probability in `scores` is NaN or infinite."""
    return all(math.isfinite(logprob) for logprob, _ in scores)


def _scored(
    hidden: Tensor, followers: Tensor, head: Callable[[Tensor], Tensor], alternatives: int, most_rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for rows, tokens in zip(hidden.split(most_rows), followers.split(most_rows), strict=True):
        table = torch.log_softmax(head(rows).float(), dim=-1)
        top = table.topk(min(alternatives, table.shape[1]))
        yield table.gather(1, tokens.unsqueeze(1)).squeeze(1), top.indices, top.values
