"""The port to model endpoints: what is asked of one, and what it answers."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from helexa.acp.config import Endpoint
from helexa.acp.history import Message

ErrorKind = Literal[
    "auth", "budget", "rate_limit", "context_limit", "model_not_found", "invalid", "unavailable", "interrupted"
]
FinishReason = Literal["stop", "length", "tool_calls", "refusal"]
ThoughtLevel = Literal["default", "none", "low", "medium", "high"]


class ProviderError(Exception):
    """An endpoint did not answer as asked.

    Attributes:
        kind: what to do about it: wait, compact, tell the user.
        message: a sentence for the user, free of secrets.
        retry_after: seconds to wait, where the endpoint said so.
        context_limit: tokens that fit, where the endpoint said so.
    """

    def __init__(
        self, kind: ErrorKind, message: str, *, retry_after: float | None = None, context_limit: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after = retry_after
        self.context_limit = context_limit


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model is told of it; `schema` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as its endpoint describes it; None where it says nothing.

    Attributes:
        id: as it is asked for.
        context: tokens that fit, prompt and answer together.
        input_price: US dollars for a million tokens, likewise the next two.
        images: whether it looks at pictures.
        thinks: whether a thought level makes a difference.
    """

    id: str
    context: int | None = None
    max_output: int | None = None
    input_price: float | None = None
    output_price: float | None = None
    cached_price: float | None = None
    images: bool | None = None
    thinks: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One question to a model. `messages` are what it shall see: no Summary and no Cleared among them."""

    model: str
    system: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    thought_level: ThoughtLevel = "default"
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a tool call; `id` and `name` come with the first one of each `index`, or never: then the text tells."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; `cached` are among `input`, `reasoning` among `output`."""

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The answer is complete; `extras` goes into the history as it is."""

    reason: FinishReason
    extras: dict[str, Any] = field(default_factory=dict)


ModelEvent = AnswerDelta | ReasoningDelta | CallDelta | Usage | End


class Provider(Protocol):
    """One endpoint, in the wire API that it speaks. All methods raise ProviderError and nothing else of their own."""

    endpoint: Endpoint

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Ask; the last event is End. Cancelling the reader closes the connection at once."""
        ...

    async def models(self) -> list[ModelCard]:
        """What it serves now."""
        ...

    async def close(self) -> None:
        """Give up its connections."""
        ...


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model at an endpoint."""

    endpoint: str
    model: str

    def __str__(self) -> str:
        return f"{self.endpoint}:{self.model}"
