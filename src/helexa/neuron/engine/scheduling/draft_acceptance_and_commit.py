"""The committer: applies the results of a finished step to its sequences."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from helexa.core.logs import quoted
from helexa.neuron.engine.ipc.messages import FinishReason, Logprob, TokenOutput
from helexa.neuron.engine.scheduling.draft_length import ModelDrafter
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import Float32
from helexa.neuron.engine.step_output_logprobs_and_pooling import are_finite
from helexa.neuron.ops.kernel_header import NON_FINITE

_log = logging.getLogger("helexa.neuron.engine")


@dataclass
class DraftUse:
    """Numbers of drafts that were verified and accepted, of one source of drafts."""

    drafted: int = 0
    accepted: int = 0


class Committer:
    """Applies the results of a finished step: appends tokens, ends sequences."""

    def __init__(self, queues: Queues, most_tokens: int, recurrent: bool) -> None:
        self._queues = queues
        self._memory = queues.memory
        # maximum number of tokens of a sequence, limited by the context length and the KV cache size
        self._most_tokens = most_tokens
        # Whether the model has recurrent layers. Recurrent state cannot be rolled back. Draft tokens therefore do not
        # change the state, and accepted draft tokens are computed again in the next step.
        self._recurrent = recurrent
        self._to_clear: list[int] = []
        self.ngram_drafts, self.model_drafts = DraftUse(), DraftUse()

    def commit(
        self,
        plan: Plan,
        sampled: list[int],
        logprobs: Mapping[int, Logprob],
        hidden: Mapping[int, Float32],
        scores: Mapping[int, list[Logprob]],
    ) -> list[TokenOutput]:
        """Apply the results of a step; return the outputs (see `Scheduler.commit`)."""
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
        """Return the free KV pages that may contain NaN or infinity, and forget them.

        The caller must set the contents of the pages to zero before the next step.
        """
        pages, self._to_clear = self._to_clear, []
        return pages

    def _advance_prompt(self, entry: PlanEntry, scored: list[Logprob]) -> TokenOutput | None:
        """Record that a chunk of a prompt is computed, for an entry that samples no token.

        If this was the last chunk, the sequence ends, because the request asks for no output tokens. Return the output
        of the sequence; None if there is nothing to report.
        """
        sequence = entry.sequence
        self._memory.advance(sequence, entry.count)
        if entry.completes:
            self._queues.recent.remember(sequence)
            # The request asks for no output tokens.
            self._queues.end(sequence)
            return TokenOutput(
                id=sequence.id,
                prompt_logprobs=scored,
                cached_tokens=sequence.cached,
                miss=sequence.miss,
                finish="length",
                timing=sequence.timing(),
            )
        if sequence.request.reports_start and not sequence.cached_reported:
            sequence.cached_reported = True
            return TokenOutput(
                id=sequence.id,
                prompt_logprobs=scored,
                cached_tokens=sequence.cached,
                miss=sequence.miss,
                started=True,
            )
        return TokenOutput(id=sequence.id, prompt_logprobs=scored) if scored else None

    def _append(
        self, entry: PlanEntry, sampled: list[int], logprobs: Mapping[int, Logprob], first: int, scored: list[Logprob]
    ) -> TokenOutput:
        """Append the accepted tokens of a plan entry to its sequence; return the output.

        Args:
            sampled: the tokens sampled for the entry: one after its known tokens, and one after each draft.
            first: index of `sampled[0]` among all sampled tokens of the step.
        """
        sequence = entry.sequence
        # The matcher may have failed on a draft. Later drafts were then not checked, so they are not accepted.
        ahead = len(entry.drafts) if sequence.matcher is None else sequence.matcher.ahead
        accepted = _accepted(entry.drafts[:ahead], sampled)
        # A suspect (see `Queues.suspects`) has now sampled a token in a step of its own, so it is not the cause of the
        # failed step.
        self._queues.clear_suspicion(sequence)
        if accepted[-1] == NON_FINITE:
            return self._end_non_finite(sequence)
        if entry.drafter is not None:
            entry.drafter.learn(len(entry.drafts), len(accepted) - 1)
            use = self.model_drafts if isinstance(entry.drafter, ModelDrafter) else self.ngram_drafts
            use.drafted += len(entry.drafts)
            use.accepted += len(accepted) - 1
        if sequence.generated == 0:
            self._queues.recent.remember(sequence)
        cached, miss = (0, None) if sequence.cached_reported else (sequence.cached, sequence.miss)
        sequence.cached_reported = True
        tokens: list[int] = []
        finish: FinishReason | None = None
        for token in accepted:
            tokens.append(token)
            finish = sequence.append(token) or ("length" if len(sequence.tokens) >= self._most_tokens else None)
            # Accepted tokens after the end of the sequence are dropped.
            if finish is not None:
                break
        if finish == "error":
            return self._end_grammar_error(sequence)
        sequence.fresh = len(tokens)
        # Accepted drafts are computed already, except in recurrent layers.
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
            miss=miss,
            finish=finish,
            timing=timing,
        )

    def _end_non_finite(self, sequence: Sequence) -> TokenOutput:
        """End a sequence with an error because its results are NaN or infinite."""
        # No later prompt may start from the pages and snapshots of this sequence.
        self._to_clear += self._queues.discard(sequence)
        return sequence.failure(
            "the logits of this request are not finite (NaN or infinity); load the model with another dtype"
        )

    def _end_pooled(self, sequence: Sequence, vector: list[float]) -> TokenOutput:
        """End an embedding request with its `vector`."""
        # The vector is empty if it would contain NaN or infinity.
        if not vector:
            return self._end_non_finite(sequence)
        self._queues.end(sequence)
        return TokenOutput(id=sequence.id, vector=vector, finish="stop", timing=sequence.timing())

    def _end_grammar_error(self, sequence: Sequence) -> TokenOutput:
        """End a sequence with the error of its grammar matcher."""
        matcher = sequence.matcher
        assert matcher is not None
        self._queues.end(sequence)
        # The error is not the fault of the request, so the operator must see it.
        if not matcher.bad_grammar:
            fields = (sequence.id, quoted(matcher.error))
            _log.error("request failed, because its grammar could not be applied sequence=%d error=%s", *fields)
        return sequence.failure(matcher.error, bad_grammar=matcher.bad_grammar)


def _accepted(drafts: tuple[int, ...], sampled: list[int]) -> list[int]:
    """Return the leading drafts that equal the sampled tokens, then one sampled token."""
    matched = 0
    while matched < len(drafts) and sampled[matched] == drafts[matched]:
        matched += 1
    return sampled[: matched + 1]
