"""One sequence: its tokens, how many of them are computed, and the pages that hold them."""

import time
from dataclasses import dataclass, field

from helexa.neuron.engine.ipc.messages import Embed, FinishReason, Generate, SamplingParams, Timing, TokenOutput
from helexa.neuron.engine.sampling.grammar_matcher import Guide
from helexa.neuron.engine.scheduling.distinct_tokens import DistinctTokens
from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.step.pooling import PooledVector


@dataclass(eq=False)
class Sequence:
    """A request inside the engine. `computed` chases `len(tokens)`; everything else follows from that.

    Attributes:
        tokens: prompt and output.
        computed: leading tokens whose K and V are in `pages`.
        cached: prompt tokens that were found in the KV cache when the sequence was first started.
        cached_reported: the server knows `cached`.
        pooled: its vector in the making, if that is what is wanted of it, and no output.
        guide: where its output stands in its grammar, if it has one.
        chain: hashes of its leading full pages as far as they were needed (see `page_hash`), made by the scheduler.
        scored: leading prompt tokens whose log-probabilities are reported, if the request asks for them.
        drafter: guesses its next tokens; made when there is a use for it.
        fresh: tokens that the last step brought; until they are computed, too, it is decoding.
        slot: of its recurrent state while it runs, where the model has such.
        restore: the snapshot that its state begins from, until its first step.
        stepped: the number of the last step in which it was while decoding.
        follower: hash of the page at whose end its latest snapshot while decoding was taken.
        read_tokens, read_seconds: see `Timing`.
        distinct: its tokens without repetitions.
        arrival: number of the sequence in the order in which the scheduler received them.
    """

    request: Generate
    tokens: list[int] = field(default_factory=list[int])
    computed: int = 0
    pages: list[int] = field(default_factory=list[int])
    cached: int = 0
    cached_reported: bool = False
    pooled: PooledVector | None = None
    guide: Guide | None = None
    chain: list[bytes] = field(default_factory=list[bytes])
    scored: int = 1  # the first token has none
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
        """One that ends when its prompt is computed."""
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
        """Who it is for; empty for anonymous callers."""
        return self.request.salt

    def wanted(self, start: int, stop: int) -> range:
        """Return the positions from `start` to `stop` whose hidden states are wanted: to be pooled, or to be scored."""
        if self.pooled is not None:
            return self.pooled.wanted(start, stop)
        if self.request.prompt_logprobs is None:
            return range(0)
        return range(max(start, self.scored - 1), min(stop, len(self.request.prompt) - 1))

    @property
    def pending(self) -> int:
        """Tokens not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Only what the last step brought is not computed yet, or a single token."""
        return self.pending == 1 or 0 < self.pending <= self.fresh

    @property
    def generated(self) -> int:
        """Tokens of output so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def said(self) -> list[int]:
        """The output so far, and that of the request before it that this one goes on with."""
        return self.tokens[len(self.request.prompt) - self.request.said :]

    def append(self, token: int) -> FinishReason | None:
        """Take a sampled token; say whether it ends the sequence, and why."""
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
        """Where the time went until now, in milliseconds."""
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
        """The last output of a sequence that ends in an error."""
        return TokenOutput(id=self.id, finish="error", error=error, bad_grammar=bad_grammar, timing=self.timing())
