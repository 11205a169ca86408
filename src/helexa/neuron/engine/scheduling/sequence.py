"""One request inside the engine: its tokens, its KV pages, and how many of its tokens are computed."""

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from helexa.neuron.engine.ipc.messages import (
    MAX_TRACED_STEPS,
    Embed,
    FinishReason,
    Generate,
    SamplingParams,
    Timing,
    TokenOutput,
    TracedStep,
)
from helexa.neuron.engine.sampling.grammar_matcher import GrammarMatcher
from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.scheduling.prompt_images import PromptImages
from helexa.neuron.engine.scheduling.token_counts import TokenCounts
from helexa.neuron.engine.step.pooling import PooledVector
from helexa.neuron.engine.step.step_input import Float32


@dataclass(eq=False)
class Sequence:
    """A request inside the engine. Steps increase `computed` until all of its `tokens` are computed.

    Attributes:
        tokens: token ids of the prompt, then of the output.
        computed: number of leading tokens whose K and V are in the KV cache.
        cached: number of prompt tokens that were found in the KV cache when the sequence first started.
        cached_reported: whether an output has reported `cached`.
        pooled: the embedding of the prompt, as far as it is computed; None for a sequence that generates tokens.
        matcher: grammar matcher of the output; None without a grammar.
        chain: hashes of the leading full pages, preceded by the hash of the salt (see `page_hash`). The scheduler adds
            the first hash. Page hashes are computed when they are needed.
        scored: number of leading prompt tokens whose log-probabilities are computed, if the request asks for them.
        drafter: source of draft tokens; created on first use.
        fresh: number of tokens that the last step added to `tokens`. If at most these tokens are not computed, the
            sequence counts as decoding.
        slot: state slot of a running sequence; None if the model has no recurrent layers.
        restore: pinned slot of the snapshot that the sequence's next step copies to `slot`; None if there is nothing to
            copy.
        stepped: number of the last step in which the sequence decoded.
        follower: page hash of the latest snapshot that was taken in the output; the next snapshot replaces it.
        read_tokens, read_seconds: see `Timing`.
        steps: the first steps of a traced sequence.
        images: the images of the prompt; None without images. The scheduler sets it.
        pixels: the input of the vision tower for each image (see `PreparedImage.pixels`).
        encoded: index and embeddings of the image of which the last step computed a part; None if the last step ended
            outside of an image (see `ImageEncoder`).
        arrived, started, first_token: times of these events in seconds of `time.perf_counter`; None before the event.
        arrival: position of the sequence in the order of arrival.
        place: position in the waiting queue; smaller positions start first.
        matched: number of leading full pages that were in the prefix cache when `Memory.cached_pages` last looked.
    """

    request: Generate
    tokens: list[int] = field(default_factory=list[int])
    computed: int = 0
    pages: list[int] = field(default_factory=list[int])
    cached: int = 0
    cached_reported: bool = False
    pooled: PooledVector | None = None
    matcher: GrammarMatcher | None = None
    chain: list[bytes] = field(default_factory=list[bytes])
    scored: int = 1  # the first token has no log-probability
    drafter: Drafter | None = None
    fresh: int = 0
    slot: int | None = None
    restore: int | None = None
    stepped: int = 0
    follower: bytes | None = None
    images: PromptImages | None = None
    pixels: Rows[Float32] = ()
    encoded: tuple[int, Any] | None = None
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    read_tokens: int = 0
    read_seconds: float = 0.0
    steps: list[TracedStep] = field(default_factory=list[TracedStep])
    arrival: int = 0
    place: int = 0
    matched: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @classmethod
    def to_embed(cls, message: Embed) -> "Sequence":
        """Return a sequence for an embedding request. The sequence ends when its prompt is computed."""
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
        """The counts of the token ids in the output, including output of an earlier request that is part of the prompt.

        `Generate.prior_output` is the number of these earlier tokens.
        """
        return TokenCounts(self.tokens, max(len(self.request.prompt) - self.request.prior_output, 0))

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def principal(self) -> str:
        """The principal (API key owner) that sent the request; empty for anonymous clients."""
        return self.request.salt

    def wanted(self, start: int, stop: int) -> range:
        """Return the positions from `start` to `stop` (exclusive) whose hidden states the request needs.

        An embedding or log-probabilities of the prompt need hidden states. For other requests, the range is empty.
        """
        if self.pooled is not None:
            return self.pooled.wanted(start, stop)
        if self.request.prompt_logprobs is None:
            return range(0)
        return range(max(start, self.scored - 1), min(stop, len(self.request.prompt) - 1))

    @property
    def pending(self) -> int:
        """Number of tokens of the sequence that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the sequence has finished prefill.

        This is the case if only the tokens that the last step added, or a single token, are not computed yet.
        """
        return self.pending == 1 or 0 < self.pending <= self.fresh

    @property
    def generated(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled token. Return the finish reason if the token ends the sequence, else None."""
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
        """Record a finished step of a traced sequence. Do nothing after `MAX_TRACED_STEPS` steps.

        Args:
            begun: start of the step in seconds of `time.perf_counter`.
            seconds: duration of the step.
            tokens: number of tokens of this sequence that the step computed.
            batch: number of sequences in the step.
        """
        if len(self.steps) < MAX_TRACED_STEPS:
            begun_ms = (begun - self.arrived) * 1e3
            self.steps.append(TracedStep(begun_ms=begun_ms, ms=seconds * 1e3, tokens=tokens, batch=batch))

    def timing(self) -> Timing:
        """Return how long the sequence has spent in the waiting queue, in prefill and in decode until now."""
        now = time.perf_counter()
        started = self.started or now
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
        """Return the output that reports `error` as the end of this sequence. The caller must remove the sequence."""
        return TokenOutput(id=self.id, finish="error", error=error, bad_grammar=bad_grammar, timing=self.timing())
