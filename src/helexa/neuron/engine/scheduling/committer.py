"""The committer: applies the results of a finished step to its sequences."""

import logging
from collections.abc import Mapping

from helexa.neuron.engine.ipc.messages import FinishReason, Logprob, TokenOutput
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step.prompt_scores import are_finite
from helexa.neuron.engine.step.step_input import Float32
from helexa.neuron.ops.constants import NON_FINITE

_log = logging.getLogger("helexa.neuron.engine")


class Committer:
    """Advances the sequences of each finished step, and ends the sequences that are complete or have failed.

    Args:
        most_tokens: maximum number of tokens of a sequence, limited by the context length and the KV cache size.
        recurrent: whether the model has recurrent layers. Recurrent state cannot be rolled back. Draft tokens therefore
            do not change the state, and accepted draft tokens are computed again in the next step.
    """

    def __init__(self, queues: Queues, most_tokens: int, recurrent: bool) -> None:
        self._queues = queues
        self._memory = queues.memory
        self._most_tokens = most_tokens
        self._recurrent = recurrent
        self._to_clear: list[int] = []

    def commit(
        self,
        plan: Plan,
        sampled: list[int],
        logprobs: Mapping[int, Logprob],
        hidden: Mapping[int, Float32],
        scores: Mapping[int, list[Logprob]],
    ) -> list[TokenOutput]:
        """Apply the results of a finished step, and return the new outputs.

        `Scheduler.commit` describes the arguments.
        """
        row = 0
        outputs: list[TokenOutput] = []
        for entry in plan:
            sequence = entry.sequence
            first, row = row, row + entry.samples * (len(entry.drafts) + 1)
            if not sequence.pages:  # the sequence ended or was canceled after the step was planned
                self._memory.unreserve(entry.save)
                continue
            self._memory.take_snapshot(entry)
            scored = scores.get(sequence.id, [])
            sequence.scored += len(scored)
            output = None
            if sequence.pooled is not None:
                sequence.pooled.add(sequence.computed, hidden.get(sequence.id))
                if entry.completes:
                    output = self._end_pooled(sequence, sequence.pooled.finish())
                else:
                    self._memory.advance(sequence, entry.count)
            elif not are_finite(scored):
                output = self._end_non_finite(sequence)
            elif not entry.samples:
                output = self._advance_prompt(entry, scored)
            else:
                output = self._append(entry, sampled[first:row], logprobs, first, scored)
            if output is not None:
                outputs.append(output)
        return outputs

    def take_pages_to_clear(self) -> list[int]:
        """Return the free KV pages that may contain NaN or infinity, and clear the list of these pages.

        The caller must set the contents of the pages to zero before the next step.
        """
        pages, self._to_clear = self._to_clear, []
        return pages

    def _advance_prompt(self, entry: PlanEntry, scored: list[Logprob]) -> TokenOutput | None:
        """Record that a chunk of a prompt is computed, for an entry that samples no token. Return the output, if any.

        If the prompt is complete, the sequence ends, because the request asks for no output tokens.
        """
        sequence = entry.sequence
        self._memory.advance(sequence, entry.count)
        if entry.completes:
            self._queues.end(sequence)
            return TokenOutput(
                id=sequence.id,
                prompt_logprobs=scored,
                cached_tokens=sequence.cached,
                finish="length",
                timing=sequence.timing(),
            )
        if sequence.request.reports_start and not sequence.cached_reported:
            sequence.cached_reported = True
            return TokenOutput(id=sequence.id, prompt_logprobs=scored, cached_tokens=sequence.cached, started=True)
        return TokenOutput(id=sequence.id, prompt_logprobs=scored) if scored else None

    def _append(
        self, entry: PlanEntry, sampled: list[int], logprobs: Mapping[int, Logprob], first: int, scored: list[Logprob]
    ) -> TokenOutput:
        """Append the accepted tokens of a plan entry to its sequence, and return the output.

        If one of the tokens ends the sequence, the tokens after it are dropped.

        Args:
            sampled: the tokens sampled for the entry: one after its known tokens, and one after each draft.
            first: index of `sampled[0]` among all sampled tokens of the step.
        """
        sequence = entry.sequence
        ahead = len(entry.drafts) if sequence.matcher is None else sequence.matcher.ahead
        accepted = _accepted(entry.drafts[:ahead], sampled)
        self._queues.clear_suspicion(sequence)
        if accepted[-1] == NON_FINITE:
            return self._end_non_finite(sequence)
        if entry.drafter is not None:
            entry.drafter.learn(len(entry.drafts), len(accepted) - 1)
        cached = 0 if sequence.cached_reported else sequence.cached
        sequence.cached_reported = True
        tokens: list[int] = []
        finish: FinishReason | None = None
        for token in accepted:
            tokens.append(token)
            finish = sequence.append(token) or ("length" if len(sequence.tokens) >= self._most_tokens else None)
            if finish is not None:
                break
        if finish == "error":
            return self._end_guide_error(sequence)
        sequence.fresh = len(tokens)
        self._memory.advance(sequence, entry.count + (0 if self._recurrent else len(tokens) - 1))
        timing = None
        if finish is not None:
            timing = sequence.timing()
            self._queues.end(sequence)
        return TokenOutput(
            id=sequence.id,
            tokens=tokens,
            logprobs=[logprobs[first + i] for i in range(len(tokens))] if first in logprobs else [],
            prompt_logprobs=scored,
            cached_tokens=cached,
            finish=finish,
            timing=timing,
        )

    def _end_non_finite(self, sequence: Sequence) -> TokenOutput:
        """End a sequence with an error because its results are NaN or infinite. Unregister its pages and snapshots."""
        self._to_clear += self._queues.discard(sequence)
        return sequence.failure("the logits of this request are not finite")

    def _end_pooled(self, sequence: Sequence, vector: list[float]) -> TokenOutput:
        """End an embedding request with its `vector`. If the vector is empty, end it with an error.

        The vector is empty if it would contain NaN or infinity.
        """
        if not vector:
            return self._end_non_finite(sequence)
        self._queues.end(sequence)
        return TokenOutput(id=sequence.id, vector=vector, finish="stop", timing=sequence.timing())

    def _end_guide_error(self, sequence: Sequence) -> TokenOutput:
        """End a sequence with the error of its grammar matcher."""
        matcher = sequence.matcher
        assert matcher is not None
        self._queues.end(sequence)
        if not matcher.bad_grammar:
            _log.error("sequence failed id=%d error=%s", sequence.id, matcher.error)
        return sequence.failure(matcher.error, bad_grammar=matcher.bad_grammar)


def _accepted(drafts: tuple[int, ...], sampled: list[int]) -> list[int]:
    """Return the tokens to append to the sequence: the accepted drafts, and the token sampled after the last of them.

    The leading drafts that equal the sampled tokens are accepted.
    """
    matched = 0
    while matched < len(drafts) and sampled[matched] == drafts[matched]:
        matched += 1
    return sampled[: matched + 1]
