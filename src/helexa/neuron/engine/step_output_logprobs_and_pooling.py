"""Results of a step: sampled tokens, log-probabilities, prompt scores, embeddings.

A launched step samples a token for each row on the device, and is read later (`StepInFlight`).

The operations on each row are: logit bias, penalties, temperature, top-k, top-p, min-p, random draw. `Ops.sample`
computes them. The random number of a draw depends only on the row's seed and position. The sampled tokens are therefore
independent of other sequences in the batch and of preemptions.

If a grammar rejects a row's token, a second draw with another random number chooses among the allowed tokens. Without
top-k, top-p and min-p, the result has the model's distribution over the allowed tokens (rejection sampling). With these
filters, the distribution may differ from one in which the filters are applied only to the allowed tokens. The reason is
that the first draw can choose a token that passes the filters in the whole vocabulary, but would not pass them among
the allowed tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from helexa.neuron import tensors
from helexa.neuron.engine.grammar_matcher import Mask
from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.engine.step_input_and_graph_sizes import Float32, HiddenRows, int32
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.sampling import Sampling
from helexa.neuron.tensors import Tensor
from helexa.neuron.text.settings_and_sampling_defaults import Pooling

MOST_ROWS = 64  # Maximum rows of logits in memory. Logits take about 100 times as much memory as hidden states.

# Type of functions that receive the sampled token of each row, and return a mask of the allowed tokens by row index,
# for each row whose token the grammar rejects.
RejectionMasks = Callable[[list[int]], dict[int, Mask]]


class Readback:
    """A copy of a step's tensor to the host. The constructor starts the copy.

    Without CUDA, the tensor must stay unchanged until the result of `wait` is read, because `wait` may return it.
    """

    def __init__(self, tensor: Tensor) -> None:
        # The tensor to copy. On a GPU, kernels that are launched later may overwrite the tensor. On other devices, the
        # tensor must stay unchanged until `wait` returns.
        self._copy = tensor
        self._event: tensors.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
            event = self._event = tensors.cuda.Event()
            event.record()

    def wait(self) -> Tensor:
        """Wait for the copy, and return it as a CPU tensor."""
        if self._event is not None:
            # Wait for this copy only, because kernels that were launched later are still running.
            self._event.synchronize()
        return self._copy.cpu()


class PooledVector:
    """Combines hidden states of the steps of one sequence into its embedding.

    Args:
        pooling: see `Embed.pooling`.
        length: number of tokens of the sequence.
    """

    def __init__(self, pooling: Pooling, length: int) -> None:
        self._pooling = pooling
        self._positions = {"last": range(length - 1, length), "cls": range(1)}.get(pooling, range(length))
        self._total: Float32 | None = None

    def wanted(self, start: int, stop: int) -> range:
        """Return the positions in [start, stop) whose hidden states the embedding needs."""
        return range(max(start, self._positions.start), min(stop, self._positions.stop))

    def rows(self, sequence: int, positions: range) -> HiddenRows:
        """Return how a step must combine the hidden states at `positions`."""
        is_weighted = self._pooling == "weightedmean"
        weights = np.arange(positions.start + 1, positions.stop + 1, dtype=np.float32) if is_weighted else None
        return HiddenRows(sequence, len(positions), weights=weights, takes_maximum=self._pooling == "max")

    def add(self, start: int, total: Float32 | None) -> None:
        """Combine the hidden states of one step with those of earlier steps.

        Args:
            start: position of the step's first token in the sequence.
            total: float32 [H] (H: hidden size), the sum or maximum of the hidden states of the step at the positions
                that `wanted` returns; None if there are no such positions.
        """
        # The sequence is new, or was preempted and starts again.
        if start == 0:
            self._total = None
        if total is not None and self._total is not None:
            self._total = np.maximum(self._total, total) if self._pooling == "max" else self._total + total
        elif total is not None:
            self._total = total

    def stays_finite(self, start: int, total: Float32 | None) -> bool:
        """Return whether `add` with these arguments would keep the vector finite."""
        totals = [array for array in (self._total if start else None, total) if array is not None]
        return bool(totals) and all(bool(np.isfinite(array).all()) for array in totals)

    def finish(self) -> list[float]:
        """Return the embedding after the last step; empty if it is not finite."""
        if self._total is None or not bool(np.isfinite(self._total).all()):
            return []
        count = len(self._positions)
        divisor = {"max": 1, "weightedmean": count * (count + 1) / 2}.get(self._pooling, count)
        return (self._total / divisor).tolist()


@dataclass(frozen=True)
class ScoresReadback:
    """Prompt scores of a sequence in one step; their copy to the host may be pending."""

    logprobs: Readback  # float32 [R], the log-probabilities of R prompt tokens
    # int64 [R, alternatives], the likeliest tokens at the position of each prompt token, the likeliest first
    ids: Readback
    values: Readback  # float32 [R, alternatives], the log-probabilities of the tokens `ids`

    def wait(self) -> list[Logprob]:
        """Wait for the copies to the host, and return the scores in prompt order."""
        logprobs, ids, values = (copy.wait().tolist() for copy in (self.logprobs, self.ids, self.values))
        tops = [list(zip(*top, strict=True)) for top in zip(ids, values, strict=True)]
        return list(zip(logprobs, tops, strict=True))


def begin_scores(
    ops: Ops,
    rows: list[HiddenRows],
    hidden: Tensor | None,
    head: Callable[[Tensor], Tensor],
    most_rows: int = MOST_ROWS,
) -> dict[int, ScoresReadback]:
    """Launch the computation of a step's prompt scores without waiting.

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
            next_tokens = tensors.from_numpy(entry.followers).to(hidden.device, tensors.int64)
            parts_by_field = zip(*_scored(ops, states, next_tokens, head, entry.alternatives, most_rows), strict=True)
            scores[entry.sequence] = ScoresReadback(*(Readback(tensors.cat(parts)) for parts in parts_by_field))
    return scores


def are_finite(scores: list[Logprob]) -> bool:
    """Return whether no log-probability in `scores` is NaN or infinite."""
    return all(math.isfinite(logprob) for logprob, _ in scores)


def _scored(
    ops: Ops, hidden: Tensor, followers: Tensor, head: Callable[[Tensor], Tensor], alternatives: int, most_rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for rows, tokens in zip(hidden.split(most_rows), followers.split(most_rows), strict=True):
        yield ops.log_probabilities(head(rows), tokens, alternatives)


class Logprobs:
    """The log-probabilities of a step's sampled tokens, which may not be computed yet.

    The values are for temperature 1, without penalties, biases and grammars.

    Args:
        logits: [S, vocabulary], the model's logits for S rows, of any float dtype.
        alternatives: number of likeliest tokens to report, by row, for the rows that request log-probabilities.
        tokens: int64 [S], the sampled token of each row, on the device.
    """

    def __init__(self, ops: Ops, logits: Tensor, alternatives: dict[int, int], tokens: Tensor) -> None:
        self._ops, self._logits, self._alternatives = ops, logits, alternatives
        self._begun = [Readback(tensor) for tensor in (tokens, *self._of(tokens))] if alternatives else []

    def read(self, tokens: list[int]) -> dict[int, Logprob]:
        """Return log-probabilities and likeliest tokens of the rows that request them.

        Args:
            tokens: the final token of each row. Rows with a negative token are omitted.
        """
        if not self._alternatives:
            return {}
        sampled, *scores = (copy.wait() for copy in self._begun)
        # If a grammar has replaced a token, the log-probability is computed again from the logits.
        if tokens != sampled.tolist():
            scores = self._of(tensors.tensor(tokens, device=self._logits.device))
        return {
            row: (logprob, list(zip(ids[:count], values[:count], strict=True)))
            for (row, count), logprob, ids, values in zip(
                self._alternatives.items(), *(score.tolist() for score in scores), strict=True
            )
            if tokens[row] >= 0
        }

    def _of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, most = int32(list(self._alternatives)), max(self._alternatives.values())
        return self._ops.log_probabilities(self._logits, tokens, most, rows)


@dataclass(frozen=True)
class StepOutput:
    """The result of one step."""

    # the sampled token of each row that samples; `NON_FINITE` if the row's largest logit is NaN or infinite
    tokens: list[int]
    # log-probabilities of sampled tokens, by index in `tokens`, for rows that request them
    logprobs: dict[int, Logprob] = field(default_factory=dict[int, Logprob])
    # float32 [H] (H: hidden size), the sum or maximum of hidden states, by sequence id, for embedding requests
    hidden: dict[int, Float32] = field(default_factory=dict[int, Float32])
    # log-probabilities of prompt tokens that this step has computed, by sequence id, for requests that set
    # `prompt_logprobs`
    scores: dict[int, list[Logprob]] = field(default_factory=dict[int, list[Logprob]])
    # hidden states of the rows of `StepInput.sample_rows` (see `KeptStates`); None without a draft head
    kept: Float32 | None = None


class Sampled:
    """The tokens that the device samples in one step, which may not be computed yet.

    Args:
        logits: [rows, vocabulary], of any float dtype. They are kept for the second draw of rejected tokens.
        last: int64, the tokens that the previous step has sampled; None if no adjustment in `sampling` refers to
            them.
    """

    def __init__(self, ops: Ops, logits: Tensor, sampling: Sampling, last: Tensor | None = None) -> None:
        # int64 [S], one token for each of S rows, on the device; `NON_FINITE` if the row's largest logit is NaN or
        # infinite
        self.tokens = ops.sample(logits, sampling, last)
        self._ops, self._logits, self._sampling, self._last = ops, logits, sampling, last
        self._copy = Readback(self.tokens)

    def read(self, rejection_masks: RejectionMasks | None = None) -> list[int]:
        """Wait for the tokens, replace those that a grammar rejects, and return them.

        The second draw of rejected tokens reads the logits, so no later step may have overwritten them.

        Args:
            rejection_masks: returns masks of the allowed tokens for the rejected rows; None accepts all tokens.
        """
        tokens: list[int] = self._copy.wait().tolist()
        masks = rejection_masks(tokens) if rejection_masks is not None else {}
        # The second draw needs the logits, which must be unchanged since the first.
        if masks:
            redrawn = self._ops.sample_masked(self._logits, masks, self._sampling, self._last)
            for row, token in zip(masks, redrawn, strict=True):
                tokens[row] = token
        return tokens


@dataclass(frozen=True)
class StepInFlight:
    """A step that was launched. The device may still be computing its results."""

    sampled: Sampled | None = None  # the sampled tokens; None if the step samples no tokens
    logprobs: Logprobs | None = None  # log-probabilities of the sampled tokens; None if the step samples no tokens
    # sums or maxima of hidden states for embeddings by sequence id, from `begin_sums`
    hidden: Mapping[int, Readback] = field(default_factory=dict[int, Readback])
    # log-probabilities of prompt tokens by sequence id, from `begin_scores`
    scores: Mapping[int, ScoresReadback] = field(default_factory=dict[int, ScoresReadback])
    kept: Float32 | None = None  # hidden states for a draft head (see `StepOutput.kept`)

    @tensors.inference_mode()
    def read(self, rejection_masks: RejectionMasks | None = None) -> StepOutput:
        """Wait for the results of this step, but not for later steps; return them.

        `rejection_masks` may reject tokens only if no later step was launched (see `Sampled.read`).
        """
        sums = {number: copy.wait().numpy() for number, copy in self.hidden.items()}
        scores = {number: copy.wait() for number, copy in self.scores.items()}
        if self.sampled is None or self.logprobs is None:
            return StepOutput([], hidden=sums, scores=scores, kept=self.kept)
        tokens = self.sampled.read(rejection_masks)
        return StepOutput(tokens, self.logprobs.read(tokens), sums, scores, self.kept)


def begin_sums(rows: list[HiddenRows], hidden: Tensor | None) -> dict[int, Readback]:
    """Launch the sums or maxima of hidden states for embeddings, and their copies.

    Returns:
        The pending copies by sequence id, for sequences that need an embedding.
    """
    if hidden is None:
        return {}
    pairs = zip(rows, hidden.split([entry.count for entry in rows]), strict=True)
    return {
        entry.sequence: Readback(_total(entry, states.float()))
        for entry, states in pairs
        if entry.followers is None and not entry.kept
    }


def _total(entry: HiddenRows, states: Tensor) -> Tensor:
    if entry.takes_maximum:
        return states.amax(0)
    if entry.weights is not None:
        states = states * tensors.from_numpy(entry.weights).to(states.device).unsqueeze(1)
    return states.sum(0)
