"""The interface of API formats, and the state of a partly received response."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.measurement.request_record import DeltaKind, ToolCall
from helexa.core.sse import ServerSentEvent


class StreamError(Exception):
    """The streamed response contains an error or invalid data, or ended early."""


@dataclass(slots=True)
class Answer:
    """A streamed response, as far as it has been received.

    Attributes:
        text: texts of the received chunks.
        reasoning: reasoning texts of the received chunks.
        calls: tool calls by their index in the response.
        finish_reason: finish reason, or None if it has not been received.
        ended: True if the stream's last event has been received.
        counted: number of completion tokens that the server reported with the last chunk, or None if the chunk had no
            count.
        prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens: token counts reported by the server, or None.
        prefill_s, decode_s, queue_s: durations in seconds reported by the server, or None.
    """

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, ToolCall] = field(default_factory=dict[int, ToolCall])
    finish_reason: str | None = None
    ended: bool = False
    counted: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    queue_s: float | None = None

    def add_call(self, index: int, name: str, arguments: str) -> bool:
        """Append to the name and the arguments of the tool call with this index.

        Returns:
            True if `name` or `arguments` is not empty.
        """
        known = self.calls.get(index, ToolCall("", ""))
        self.calls[index] = ToolCall(known.name + name, known.arguments + arguments)
        return bool(name or arguments)


class ApiFormat(Protocol):
    """Interface of an API format: builds request bodies and parses streamed responses.

    Attributes:
        path: URL path of requests.
        substitutes: optional parameters that some models reject. The dict maps the name of each such parameter to the
            name of a replacement. None as replacement means that the parameter is omitted.
    """

    path: str
    substitutes: Mapping[str, str | None]

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Return the headers that every request needs, with the API key `bearer` if it is not None."""
        ...

    def body(self, prompt: PromptRequest, *, ignore_eos: bool) -> dict[str, Any]:
        """Return the request body for `prompt`.

        Args:
            prompt: the request.
            ignore_eos: True if the server supports the parameter `ignore_eos`.
        """
        ...

    def take(self, event: ServerSentEvent, answer: Answer) -> DeltaKind | None:
        """Parse an event of the stream and add its content to `answer`.

        Returns:
            The kind of the event's content, or None if it has no content.

        Raises:
            StreamError: the event reports an error or is invalid.
        """
        ...


def number(value: object) -> int | None:
    """Return `value` if it is a non-negative integer below 2^53, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def seconds(milliseconds: object) -> float | None:
    """Convert milliseconds to seconds. Return None if `milliseconds` is not a valid duration."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float)) or not 0 <= milliseconds < 1e12:
        return None
    return milliseconds / 1000


def text(value: object) -> str:
    """Return `value` if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """Return `value` if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def error_text(error: object) -> str:
    """Return the message of an error object from a stream, at most 500 characters."""
    return (text(error) or text(mapping(error).get("message")) or "the stream carries an error")[:500]
