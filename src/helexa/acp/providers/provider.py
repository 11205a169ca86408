"""The protocol of model endpoints: requests, answers and errors."""

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
    """A request to an endpoint failed.

    Attributes:
        kind: the cause, which decides whether the agent waits, compacts the conversation, or informs the user.
        message: a sentence for the user, without secrets.
        retry_after: seconds to wait, or None if the endpoint did not report it.
        context_limit: context size in tokens, or None if the endpoint did not report it.
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
    """A tool in a model request; `schema` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as its endpoint describes it. Unknown properties are None.

    Attributes:
        id: model name in requests.
        context: context size in tokens, prompt and answer together.
        max_output: largest answer in tokens.
        input_price: US dollars per million input tokens.
        output_price: US dollars per million output tokens.
        cached_price: US dollars per million cached input tokens.
        images: whether the model accepts images.
        thinks: whether setting a thought level has an effect on the model.
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
    """A request to a model. `messages` must not contain `Summary` or `Cleared`."""

    model: str
    system: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    thought_level: ThoughtLevel = "default"
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A part of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A part of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a tool call.

    The first delta of an `index` has the `id` and `name` of the call. If no delta has a name, the joined `arguments`
    contain the whole call as text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer. `input` includes `cached`; `output` includes `reasoning`."""

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """End of a complete answer. The history stores `extras`, data of the endpoint, unchanged."""

    reason: FinishReason
    extras: dict[str, Any] = field(default_factory=dict)


ModelEvent = AnswerDelta | ReasoningDelta | CallDelta | Usage | End


class Provider(Protocol):
    """A client of one endpoint in its wire API. Failures of the endpoint raise `ProviderError`."""

    endpoint: Endpoint

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Send a request and yield the events of the answer. The last event is `End`.

        Cancellation closes the connection immediately.
        """
        ...

    async def models(self) -> list[ModelCard]:
        """Return the models that the endpoint currently lists."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The choice of a model: the name of an endpoint, and the name of a model at this endpoint."""

    endpoint: str
    model: str

    def __str__(self) -> str:
        return f"{self.endpoint}:{self.model}"
