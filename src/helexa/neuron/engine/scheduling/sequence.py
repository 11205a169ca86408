"""A request inside the engine: a sequence of tokens, with its pages and state."""

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from helexa.neuron.engine.grammar_matcher import GrammarMatcher
from helexa.neuron.engine.ipc.messages import (
    MAX_TRACED_STEPS,
    Embed,
    FinishReason,
    Generate,
    PrefixMiss,
    SamplingParams,
    Timing,
    TokenOutput,
    TracedStep,
)
from helexa.neuron.engine.scheduling.draft_length import ModelDrafter
from helexa.neuron.engine.scheduling.ngrams_and_counts import Drafter, TokenCounts
from helexa.neuron.engine.scheduling.prompt_images import PromptImages
from helexa.neuron.engine.step_input_and_graph_sizes import Float32, Int32, int32
from helexa.neuron.engine.step_output_logprobs_and_pooling import PooledVector


@dataclass(eq=False)
class Sequence:
    """A request inside the engine. Steps advance `computed` to the end of `tokens`."""

    request: Generate
    tokens: list[int] = field(default_factory=list[int])  # token ids of the prompt, then of the output
    computed: int = 0  # number of leading tokens whose K and V are in the KV cache
    pages: list[int] = field(default_factory=list[int])
    # Number of leading pages that the sequence has released, because they lie before the sliding window of its next
    # token. Other sequences may use these pages, although `pages` still lists them.
    unseen: int = 0
    cached: int = 0  # number of prompt tokens that were found in the KV cache when the sequence first started
    cached_reported: bool = False  # whether an output has reported `cached`
    # hash of the page that ends the first half of a long prompt with a prefix key; None before the end of the prefill
    half_page: bytes | None = None
    # why a long beginning that was computed for an earlier prompt was not in the KV cache; None without such a miss
    miss: PrefixMiss | None = None
    # the embedding of the prompt, as far as it is computed; None for a sequence that generates tokens
    pooled: PooledVector | None = None
    matcher: GrammarMatcher | None = None  # grammar matcher of the output; None without a grammar
    # Hashes of the leading full pages, preceded by the hash of the salt (see `extend_chain`). The scheduler adds the
    # first hash. Page hashes are computed when they are needed.
    chain: list[bytes] = field(default_factory=list[bytes])
    # number of leading prompt tokens whose log-probabilities are computed, if the request asks for them
    scored: int = 1  # the first token has no log-probability
    drafter: Drafter | None = None  # drafts by n-gram lookup; created on first use
    # what the draft model has computed of the sequence; None if it has not drafted yet
    model_drafter: ModelDrafter | None = None
    # Number of tokens that the last step added to `tokens`. The sequence counts as decoding if all tokens except these
    # are computed.
    fresh: int = 0
    slot: int | None = None  # state slot of a running sequence; None if the model has no recurrent layers
    # pinned slot of the snapshot that the sequence's next step copies to `slot`; None if there is nothing to copy
    restore: int | None = None
    stepped: int = 0  # number of the last step in which the sequence decoded
    # page hash of the latest snapshot that was taken in the output; the next snapshot replaces it
    follower: bytes | None = None
    images: PromptImages | None = None  # the images of the prompt; None without images. The scheduler sets it.
    pixels: Rows[Float32] = ()  # the input of the vision tower for each image (see `PreparedImage.pixels`)
    # index and embeddings of the image of which the last step computed a part; None if the last step ended outside of
    # an image (see `ImageEncoder`)
    encoded: tuple[int, Any] | None = None
    # times of these events in seconds of `time.perf_counter`; None before the event
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    # see `Timing`
    read_tokens: int = 0
    read_seconds: float = 0.0
    steps: list[TracedStep] = field(default_factory=list[TracedStep])  # the first steps of a traced sequence
    arrival: int = 0  # position of the sequence in the order of arrival
    place: int = 0  # position in the waiting queue; smaller positions start first
    # number of leading full pages that were in the prefix cache when `Memory.cached_pages` last looked
    matched: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @classmethod
    def to_embed(cls, message: Embed) -> "Sequence":
        """Return a sequence for an embedding request, which ends after its prompt."""
        request = Generate(
            id=message.id, prompt=message.prompt, max_tokens=1, sampling=SamplingParams(), salt=message.salt
        )
        return cls(request, pooled=PooledVector(message.pooling, len(message.prompt)))

    @cached_property
    def token_counts(self) -> TokenCounts:
        """The counts of the token ids in `tokens`."""
        return TokenCounts(self.tokens)

    @cached_property
    def output_counts(self) -> TokenCounts:
        """Counts of the output's token ids, with the last `prior_output` prompt tokens."""
        return TokenCounts(self.tokens, max(len(self.request.prompt) - self.request.prior_output, 0))

    @cached_property
    def biases(self) -> tuple[Int32, Float32]:
        """The tokens with a logit bias, and their biases."""
        bias = self.request.sampling.logit_bias
        return int32(list(bias)), np.array(list(bias.values()), np.float32)

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def principal(self) -> str:
        """API key owner that sent the request; empty for anonymous clients."""
        return self.request.salt

    def wanted(self, start: int, stop: int) -> range:
        """Return the positions in [start, stop) whose hidden states the request needs."""
        if self.pooled is not None:
            return self.pooled.wanted(start, stop)
        if self.request.prompt_logprobs is None:
            return range(0)
        # The hidden state of a token gives the log-probability of the next token.
        return range(max(start, self.scored - 1), min(stop, len(self.request.prompt) - 1))

    @property
    def pending(self) -> int:
        """Number of tokens of the sequence that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether prefill is over: at most `fresh` tokens, or a single token, are pending."""
        # In models with recurrent layers, all tokens that the last step accepted are computed again.
        return self.pending == 1 or 0 < self.pending <= self.fresh

    @property
    def generated(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    def append(self, token: int) -> FinishReason | None:
        """Append a token; return the finish reason if it ends the sequence, else None."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.advance(token)
            if self.matcher.error:
                return "error"
        if token in self.request.stop_ids or (self.matcher is not None and self.matcher.ended):
            return "stop"
        if self.generated >= self.request.max_tokens:
            return "length"
        return None

    def trace_step(self, begun: float, seconds: float, tokens: int, batch: int) -> None:
        """Record a finished step, at most `MAX_TRACED_STEPS` of them.

        Args:
            begun: start of the step in seconds of `time.perf_counter`.
            tokens: number of tokens of this sequence that the step computed.
            batch: number of sequences in the step.
        """
        if len(self.steps) < MAX_TRACED_STEPS:
            begun_ms = (begun - self.arrived) * 1e3
            self.steps.append(TracedStep(begun_ms=begun_ms, ms=seconds * 1e3, tokens=tokens, batch=batch))

    def timing(self) -> Timing:
        """Return the time in the waiting queue, in prefill and in decode until now."""
        now = time.perf_counter()
        started = self.started or now
        # A request without output tokens has no first token.
        first = self.first_token or now
        return Timing(
            queue_ms=(started - self.arrived) * 1e3,
            prefill_ms=(first - started) * 1e3,
            decode_ms=(now - first) * 1e3,
            read_tokens=self.read_tokens,
            read_ms=self.read_seconds * 1e3,
            steps=self.steps,
        )

    def failure(self, error: str, *, bad_grammar: bool = False) -> TokenOutput:
        """Return the output that reports `error`; the caller must remove the sequence."""
        return TokenOutput(id=self.id, finish="error", error=error, bad_grammar=bad_grammar, timing=self.timing())
