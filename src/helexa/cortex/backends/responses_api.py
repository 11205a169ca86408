"""The Responses API for backends that have only chat completions."""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from helexa.core.errors import ApiError, unsupported_parameter
from helexa.core.sse import LineSplitter
from helexa.core.wire.responses_output import Event
from helexa.core.wire.responses_request import TOOL_TYPES, ResponsesRequest, with_renamed_param
from helexa.core.wire.responses_writer import ResponseWriter
from helexa.cortex.backends.answer import NodeResponse
from helexa.cortex.upstream.response_body import malformed, parse_arguments


class _Tool(msgspec.Struct):
    type: Any = None


class _Offer(msgspec.Struct):
    tools: list[_Tool] | None = None
    previous_response_id: Any = None
    store: Any = None


_offer = msgspec.json.Decoder(_Offer)
_OTHER_ITEMS = re.compile(rb'"(?:additional_tools|agent_message)"')
_TOOL_TYPES = tuple(TOOL_TYPES)  # a tuple, because a type that the client sends may be unhashable


def offers_other_tools(body: bytes) -> bool:
    """Return whether a request has items of Codex, or tools that are not functions.

    False for a request that needs stored responses or tools such as `file_search`, because no chat request can replace
    it.
    """
    try:
        offer = _offer.decode(body)
    except msgspec.DecodeError:
        return False
    is_stored = offer.previous_response_id is not None or offer.store is True
    types = [tool.type for tool in offer.tools or ()]
    has_others = any(kind != "function" for kind in types) or _OTHER_ITEMS.search(body) is not None
    return not is_stored and has_others and all(kind in _TOOL_TYPES for kind in types)


# Matches errors about the type of a tool. Other errors about a tool are caused by the client. Most errors about the
# type mention `function`, the type that the backend accepts.
_REFUSED_TYPE = re.compile(
    rb"[\"'`]function\b|\bonly\b.{0,20}\bfunction|\btool[ _]types?\b|\btools?(?:\[\d+\]|\.\d+)\.type\b"
    rb"|(?:unsupported|unknown|unrecogni[sz]ed) tools?\b|\btools?\b.{0,80}\b(?:un|not )support",
    re.IGNORECASE,
)


def refuses_tool_types(error: bytes) -> bool:
    """Return whether an error response refuses a type of tools, or items of Codex."""
    if re.search(rb"\b(?:additional_tools|agent_message)\b", error) is not None:
        return True
    return re.search(rb"\btools?\b", error) is not None and _REFUSED_TYPE.search(error) is not None


_PREVIOUS = "previous_response_id"


def read_responses_request(body: bytes) -> ResponsesRequest:
    """Parse a request of the Responses API that a chat completion will answer.

    Raises:
        ApiError: 400: a field is invalid, or needs stored responses. Responses cannot be stored, because the backend
            has only chat completions.
    """
    request = ResponsesRequest.parse(body)
    hint = "the model's server has only chat completions, which are not stored"
    if request.previous_response_id is not None:
        raise unsupported_parameter(_PREVIOUS, f"'{_PREVIOUS}' is not supported: {hint}; send the whole conversation")
    if request.store:
        raise unsupported_parameter("store", f"'store' must be false: {hint}; send store=false")
    return request


def chat_body(request: ResponsesRequest) -> bytes:
    """Return the body of the equivalent chat request, with token counts in its stream.

    Raises:
        ApiError: 400: a field is invalid or not supported. The error uses the field names of the Responses API.
    """
    try:
        chat = request.chat().model_dump(mode="json", exclude_none=True)
    except ApiError as error:
        raise with_renamed_param(error) from None
    limit = chat.pop("max_completion_tokens", None)  # many servers know only the older name `max_tokens`
    if limit is not None:
        chat["max_tokens"] = limit
    for message in chat["messages"]:
        message.setdefault("content", None)
    if request.stream:
        chat["stream_options"] = {"include_usage": True}
    return _dumped(chat)


def _dumped(chat: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(chat)
    except orjson.JSONEncodeError as error:
        raise ApiError(
            400, "invalid_request_body", f"cannot translate the request to a chat request: {error}; correct this value"
        ) from None


MAX_WAITING_CHARS = 4 << 20

_COMPLETE = ("stop", "tool_calls")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_KEEP_ALIVE = b":\n\n"
_REASON_CHARS = 64


@dataclass(eq=False)
class _Call:
    """A tool call that is sent when all earlier calls are complete."""

    index: int
    id: str
    name: str
    arguments: list[str] = field(default_factory=list[str])
    waiting: list[str] = field(default_factory=list[str])  # arguments that were not sent to the client yet
    # cached result of `is_complete`: number of pieces in `arguments`, and whether they form a complete JSON object
    _completeness: tuple[int, bool] = (-1, False)

    def is_complete(self) -> bool:
        """Return whether the arguments are a whole JSON object."""
        if not self.arguments or not self.arguments[-1].rstrip().endswith("}"):
            return False
        if self._completeness[0] != len(self.arguments):
            self._completeness = len(self.arguments), parse_arguments("".join(self.arguments)) is not None
        return self._completeness[1]


class ResponsesAnswer:
    """A well-formed chat completion, read as a response of the Responses API.

    Args:
        answer: the chat completion. It is a stream if the client requests a stream.
        input_tokens: estimated number of prompt tokens, for a backend that counts no tokens.
        on_estimate: called if the response contains an estimate of its token counts.
    """

    def __init__(
        self,
        answer: NodeResponse,
        request: ResponsesRequest,
        *,
        model: str,
        input_tokens: int,
        on_estimate: Callable[[], None],
    ) -> None:
        self.status, self.headers = answer.status, answer.headers
        self._answer = answer
        self._streamed = request.stream is True
        self._input_tokens = input_tokens
        self._on_estimate = on_estimate
        self._writer = ResponseWriter(
            model,
            request,
            stored=False,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
        )
        self._lines = LineSplitter()
        self._calls: deque[_Call] = deque()  # the first call is being sent, the others wait
        self._ended_calls = set[int]()
        self._held: list[tuple[Callable[[str], list[Event]], str]] = []  # texts that wait for the end of the calls
        self._waiting_chars = 0
        self._reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._delta_count = 0
        self._ended = False

    @property
    def complete(self) -> bool:
        """Whether the whole response has been read."""
        return self._ended

    async def chunk(self) -> bytes:
        """Return the next bytes of the response, or empty bytes at its end.

        Raises:
            ApiError: the answer is an error, malformed or incomplete.
            UpstreamError, or a subclass: the connection to the backend failed.
        """
        if not self._streamed:
            return b"" if self._ended else await self._whole()
        while data := await self._answer.chunk():
            if events := self._read_lines(data):
                return events
        return b""

    def close(self) -> None:
        """Release the connection to the backend."""
        self._answer.close()

    def _read_lines(self, data: bytes) -> bytes:
        out: list[bytes] = []
        for line in self._lines.feed(data):
            if line == b"data: [DONE]":
                items, kind, response = self._end()
                out.append(self._writer.frames(items) + self._writer.event(f"response.{kind}", response))
            elif line.startswith(b"data: "):
                if not self._writer.begun:
                    out.append(self._writer.beginnings())
                out.append(self._writer.frames(self._read_chunk(orjson.loads(line[6:]), "delta")))
            elif line.startswith(b":"):
                out.append(_KEEP_ALIVE)
        return b"".join(out)

    async def _whole(self) -> bytes:
        body = bytearray()
        while data := await self._answer.chunk():
            body += data
        self._read_chunk(orjson.loads(body), "message")
        _, _, response = self._end()
        return response

    def _read_chunk(self, chunk: dict[str, Any], name: str) -> list[Event]:
        """Add a chunk (`name` is `delta`) or a whole chat completion (`message`)."""
        self._usage = chunk.get("usage") or self._usage
        if not chunk["choices"]:
            return []
        choice = chunk["choices"][0]
        self._reason = choice.get("finish_reason") or self._reason
        return self._read_delta(choice[name])

    def _read_delta(self, delta: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        output = self._writer.output
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            events += self._read_text(output.add_reasoning, reasoning)
        for text in (delta.get("content"), delta.get("refusal")):
            if text:
                events += self._read_text(output.add_text, text)
        for index, call in enumerate(delta.get("tool_calls") or ()):
            events += self._read_call({"index": index, **call})
            self._delta_count += 1
        return events

    def _read_text(self, add: Callable[[str], list[Event]], text: str) -> list[Event]:
        self._delta_count += 1
        if all(call.is_complete() for call in self._calls):
            return [*self._end_calls(), *add(text)]
        # Some backends send text between the pieces of a call. The text waits until the call is complete, because the
        # Responses API cannot continue an item that has ended.
        self._held.append((add, text))
        self._count_waiting(text)
        return []

    def _count_waiting(self, text: str) -> None:
        self._waiting_chars += len(text)
        if self._waiting_chars > MAX_WAITING_CHARS:
            raise malformed(f"the response has more than {MAX_WAITING_CHARS} characters after an unfinished tool call")

    def _read_call(self, delta: dict[str, Any]) -> list[Event]:
        function = delta.get("function") or {}
        call = next((call for call in self._calls if call.index == delta["index"]), None)
        events: list[Event] = []
        if call is None and delta["index"] in self._ended_calls:
            if (function.get("arguments") or "").strip():
                raise malformed("arguments of a tool call arrived after the end of the call")
            return []
        is_new = call is None
        if call is None:
            call = _Call(delta["index"], delta.get("id") or "", function.get("name") or "")
            self._calls.append(call)
            if len(self._calls) == 1:
                events += self._writer.output.begin_call(call.id, call.name)
        if arguments := function.get("arguments"):
            call.arguments.append(arguments)
            if call is self._calls[0]:
                events += self._writer.output.add_arguments(arguments)
            else:
                # Chat completions may interleave the pieces of several calls, but the Responses API has one item at a
                # time. The pieces of later calls therefore wait.
                call.waiting.append(arguments)
                self._count_waiting(arguments)
        # Only a new call or a change of the first call can end the first call. Other deltas need no check.
        if is_new or call is self._calls[0]:
            while len(self._calls) > 1 and self._calls[0].is_complete():
                events += self._next_call()
        return events

    def _next_call(self) -> list[Event]:
        """End the call that is being sent, and begin the next one."""
        self._ended_calls.add(self._calls.popleft().index)
        if not self._calls:
            return []
        call = self._calls[0]
        events = self._writer.output.begin_call(call.id, call.name)
        if call.waiting:
            text = "".join(call.waiting)
            self._waiting_chars -= len(text)
            events += self._writer.output.add_arguments(text)
        return events

    def _end_calls(self) -> list[Event]:
        events: list[Event] = []
        while self._calls:
            events += self._next_call()
        held, self._held = self._held, []
        for add, text in held:
            self._waiting_chars -= len(text)
            events += add(text)
        return events

    def _end(self) -> tuple[list[Event], str, bytes]:
        """Return the last events of the items, the status and the body of the response."""
        if self._reason in _COMPLETE:
            status, details = "completed", None
        elif self._reason in _INCOMPLETE:
            status, details = "incomplete", {"reason": _INCOMPLETE[self._reason]}
        else:
            raise malformed(f"the finish reason '{str(self._reason)[:_REASON_CHARS]}' is unknown")
        events = [*self._end_calls(), *self._writer.output.end(status)]
        self._ended = True
        return events, status, self._writer.body(status, incomplete_details=details, usage=self._response_usage())

    def _response_usage(self) -> dict[str, Any]:
        usage = self._usage
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        # Some servers send no usage, or zeros. The response and the charge then contain estimates.
        if not prompt or not completion:
            self._on_estimate()
        prompt, completion = prompt or self._input_tokens, completion or max(self._delta_count, 1)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": _detail(usage, "prompt", "cached"), "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": _detail(usage, "completion", "reasoning")},
            "total_tokens": prompt + completion,
        }


def _detail(usage: dict[str, Any], part: str, name: str) -> int:
    details = usage.get(f"{part}_tokens_details")
    count = details.get(f"{name}_tokens") if isinstance(details, dict) else None
    return count if type(count) is int and count > 0 else 0
