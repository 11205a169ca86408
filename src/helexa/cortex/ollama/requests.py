"""The bodies of requests of Ollama's API."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from helexa.core.wire.request import WireObject, WireRequest

MAX_MESSAGES = 100_000
MAX_IMAGES = 10_000
MAX_TOOLS = 10_000
# Ollama's and OpenAI's maximum of `top_logprobs`.
MAX_ALTERNATIVES = 20

_DURATION = re.compile(r"(?P<sign>[+-]?)(?P<parts>(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+)")
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_UNIT_SECS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_SECS = 1e10
_LONGEST_DURATION = 100


def _whole(value: Any) -> Any:
    """Convert a float such as 40.0 to an integer; return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _seconds(value: Any) -> float | None:
    """Return the seconds of a number or of a text such as `5m` or `1h30m`.

    A negative result means that the model is never unloaded. The result is None if `value` is None.
    """
    if value is None:
        return None
    if isinstance(value, str) and len(value) <= _LONGEST_DURATION:
        if match := _DURATION.fullmatch(value):
            seconds = sum(float(number) * _UNIT_SECS[unit] for number, unit in _PART.findall(match["parts"]))
            value = -seconds if match["sign"] == "-" else seconds
        elif re.fullmatch(r"[+-]?\d+", value, re.ASCII):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise PydanticCustomError("duration", "the time must be a number of seconds, or a duration such as '5m'")
    return float(max(-_MAX_SECS, min(value, _MAX_SECS)))


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_whole)]
KeepAlive = Annotated[float | None, BeforeValidator(_seconds)]
Think = bool | Literal["low", "medium", "high", "max"] | None  # whether the model thinks before its answer, or how much


class Options(WireObject):
    """In Ollama's requests: `options`. Options that have no field here have no effect."""

    num_predict: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_texts)] = None
    repeat_penalty: float | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class CalledFunction(WireObject):
    """In Ollama's requests: the function of a tool call, and the call's arguments."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] | str | None = None  # an object, or the JSON text of an object


class ToolCall(WireObject):
    """In Ollama's requests: a tool call in a message of the model."""

    id: str | None = None
    function: CalledFunction


class Message(WireObject):
    """One message of a chat."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_lower)]
    content: str | None = None
    thinking: str | None = None  # the model's thinking before its answer
    images: Annotated[list[str] | None, Field(max_length=MAX_IMAGES)] = None  # image files in base64
    tool_calls: list[ToolCall] | None = None
    # function name and id of the tool call that a message with the role `tool` answers
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(WireObject):
    """In Ollama's requests: a function that the model can call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(WireObject):
    """In Ollama's requests: a tool that the model can call."""

    type: Literal["function"] | None = None
    function: Function


class _Generation(WireRequest):
    """The fields that `/api/chat` and `/api/generate` share."""

    stream: bool | None = None
    format: dict[str, Any] | str | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None
    think: Think = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole | None, Field(ge=0, le=MAX_ALTERNATIVES)] = None


class ChatRequest(_Generation):
    """The body of `POST /api/chat`.

    A request without messages loads or unloads the model.
    """

    messages: Annotated[list[Message] | None, Field(max_length=MAX_MESSAGES)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None


class GenerateRequest(_Generation):
    """The body of `POST /api/generate`.

    A request without a prompt loads or unloads the model.
    """

    prompt: str | None = None
    suffix: str | None = None  # text after the output: the model fills in the middle
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None  # token ids of a conversation, as Ollama returns them
    raw: bool | None = None  # True to send the prompt to the model without a chat template
    images: Annotated[list[str] | None, Field(max_length=MAX_IMAGES)] = None


class EmbedRequest(WireRequest):
    """The body of `POST /api/embed`. Without texts, it loads or unloads the model."""

    input: str | list[str] | None = None
    dimensions: Annotated[Whole | None, Field(ge=0)] = None
    truncate: bool | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbeddingsRequest(WireRequest):
    """The body of `POST /api/embeddings`, the older form of `POST /api/embed`."""

    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class ModelRequest(WireRequest):
    """The body of `/api/show`, `/api/pull` and `/api/delete`.

    Old clients send the model in the field `name`.
    """

    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {**value, "model": value.get("name")} if isinstance(value, dict) and not value.get("model") else value
