"""One sequence: its request, its tokens, how many tokens are computed, and the KV pages that hold their K and V."""

import time
from dataclasses import dataclass, field

from helexa.neuron.engine.ipc.messages import Embed, FinishReason, Generate, SamplingParams, Timing, TokenOutput
from helexa.neuron.engine.sampling.grammar_matcher import GrammarMatcher
from helexa.neuron.engine.scheduling.distinct_tokens import DistinctTokens
from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.step.pooling import PooledVector


@dataclass(eq=False)
class Sequence:
    """A request inside the engine. Steps advance `computed`, the number of computed tokens, to the length of `tokens`.

    Attributes:
        tokens: token ids of the prompt, then of the output.
        computed: number of leading tokens whose K and V are in `pages`.
        cached: number of prompt tokens that were found in the KV cache when the sequence first started.
        cached_reported: whether an output has reported `cached`.
        pooled: the embedding vector of the prompt, as far as it is computed; None for a sequence that generates tokens.
        guide: grammar matcher of the output; None without a grammar.
        chain: hash chain of the leading full pages, extended when more hashes are needed (see `page_hash`). The
            scheduler sets its first entry.
        scored: if the request asks for log-probabilities of its prompt, the number of leading prompt tokens for which
            they are computed.
        drafter: source of draft tokens; created on first use.
        fresh: number of tokens that the last step yielded. If only these tokens are not computed, the sequence counts
            as decoding.
        slot: state slot of a running sequence; None if the model has no recurrent layers.
        restore: slot of the snapshot from which the recurrent state starts; None without a snapshot or once it is used.
        stepped: number of the last step in which the sequence decoded.
        follower: page hash of the latest snapshot that was taken during decoding.
        read_tokens, read_seconds: see `Timing`.
        distinct: the sequence's tokens without duplicates.
        arrived, started, first_token: times of these events in seconds of `time.perf_counter`; None before the event.
        arrival: position of the sequence in the order of arrival.
    """

    request: Generate
    tokens: list[int] = field(default_factory=list[int])
    computed: int = 0
    pages: list[int] = field(default_factory=list[int])
    cached: int = 0
    cached_reported: bool = False
    pooled: PooledVector | None = None
    guide: GrammarMatcher | None = None
    chain: list[bytes] = field(default_factory=list[bytes])
    scored: int = 1  # the first token has no log-probability
    drafter: Drafter | None = None
    fresh: int = 0
    slot: int | None = None
    restore: int | None = None
    stepped: int = 0
    follower: bytes | None = None
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    read_tokens: int = 0
    read_seconds: float = 0.0
    arrival: int = 0
    distinct: DistinctTokens = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.distinct = DistinctTokens(self.tokens)

    @classmethod
    def to_embed(cls, message: Embed) -> "Sequence":
        """Return the sequence of an embedding request. It ends when its prompt is computed."""
        request = Generate(
            id=message.id, prompt=message.prompt, max_tokens=1, sampling=SamplingParams(), salt=message.salt
        )
        return cls(request, pooled=PooledVector(message.pooling, len(message.prompt)))

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def principal(self) -> str:
        """The principal that sent the request; empty for anonymous clients."""
        return self.request.salt

    def wanted(self, start: int, stop: int) -> range:
        """Return the positions in [start, stop) whose hidden states an embedding or prompt log-probabilities need."""
        if self.pooled is not None:
            return self.pooled.wanted(start, stop)
        if self.request.prompt_logprobs is None:
            return range(0)
        return range(max(start, self.scored - 1), min(stop, len(self.request.prompt) - 1))

    @property
    def pending(self) -> int:
        """Number of tokens that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the sequence has finished prefill: only tokens of the last step, or one token, are not computed."""
        return self.pending == 1 or 0 < self.pending <= self.fresh

    @property
    def generated(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def output_tokens(self) -> list[int]:
        """The output tokens so far, including output of an earlier request (see `Generate.prior_output`)."""
        return self.tokens[len(self.request.prompt) - self.request.prior_output :]

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled token; return the finish reason if this token ends the sequence, else None."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.tokens.append(token)
        if self.guide is not None:
            self.guide.advance(token)
            if self.guide.error:
                return "error"
        if token in self.request.stop_ids or (self.guide is not None and self.guide.ended):
            return "stop"
        if self.generated >= self.request.max_tokens:
            return "length"
        return None

    def timing(self) -> Timing:
        """Return the milliseconds that the sequence has spent in each phase (waiting, prefill, decode) until now."""
        now = time.perf_counter()
        started = self.started or now
        first = self.first_token or now
        return Timing(
            queue_ms=(started - self.arrived) * 1e3,
            prefill_ms=(first - started) * 1e3,
            decode_ms=(now - first) * 1e3,
            read_tokens=self.read_tokens,
            read_ms=self.read_seconds * 1e3,
        )

    def failure(self, error: str, *, bad_grammar: bool = False) -> TokenOutput:
        """Return the output that ends this sequence with `error`. The caller removes the sequence."""
        return TokenOutput(id=self.id, finish="error", error=error, bad_grammar=bad_grammar, timing=self.timing())
