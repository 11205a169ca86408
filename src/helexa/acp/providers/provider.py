"""The interface of model endpoints: requests, response events and errors, independent of the API format."""

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
        kind: the cause. It determines whether the agent retries, shortens the conversation, or reports the error.
        message: a sentence for the user, without secrets.
        retry_after: seconds to wait before a retry, or None if the endpoint did not report a delay.
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
    """A tool that the model may call, as described in a request. `schema` is the JSON Schema of the arguments."""

    name: str
    description: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The properties of a model, as its endpoint lists them. Unknown properties are None.

    Attributes:
        id: model name in requests.
        context: context size in tokens, for prompt and response together.
        max_output: maximum number of response tokens.
        input_price: US dollars per million input tokens.
        output_price: US dollars per million output tokens.
        cached_price: US dollars per million cached input tokens.
        images: whether the model accepts images.
        thinks: whether a thought level (reasoning effort) has an effect on the model.
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
    """A request to a model, independent of the API format.

    Attributes:
        messages: the conversation. It must not contain `Summary` or `Cleared` entries.
        max_tokens: maximum number of response tokens.
        thought_level: reasoning effort.
    """

    model: str
    system: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    thought_level: ThoughtLevel = "default"
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A streamed chunk of the response's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A streamed chunk of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A streamed chunk of a tool call.

    All chunks of a call have the same `index`. The first chunk has the `id` and the `name` of the call. If no chunk
    has a name, the joined `arguments` contain the whole call as text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request and its response. `input` includes `cached`, and `output` includes `reasoning`."""

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a complete response.

    Attributes:
        reason: finish reason.
        extras: data of the endpoint, which the agent stores and sends back in later requests.
    """

    reason: FinishReason
    extras: dict[str, Any] = field(default_factory=dict)


ModelEvent = AnswerDelta | ReasoningDelta | CallDelta | Usage | End


class Provider(Protocol):
    """A client of one endpoint. All methods raise `ProviderError` if the endpoint fails."""

    endpoint: Endpoint

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Send a request and yield the events of the streamed response. The last event is `End`.

        Closing the generator or canceling the calling task closes the connection immediately.
        """
        ...

    async def models(self) -> list[ModelCard]:
        """Request the endpoint's list of models and return it."""
        ...

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        ...


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model that a session uses: the name of an endpoint, and the name of a model at this endpoint."""

    endpoint: str
    model: str

    def __str__(self) -> str:
        return f"{self.endpoint}:{self.model}"
