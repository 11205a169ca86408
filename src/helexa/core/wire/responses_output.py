"""The output of a Responses API response: items, their events, and usage."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import orjson

from helexa.core.wire.usage_and_encoded_lists import CacheMiss, Encoded, HelexaTiming

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Event = dict[str, Any]  # data of a server-sent event, without its `sequence_number`


class InputTokensDetails(TypedDict):
    """The `input_tokens_details` of a response's usage: cached prompt tokens.

    `cache_write_tokens` is always 0, because caching is automatic and free.
    """

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """The `output_tokens_details` of a response's usage: reasoning tokens."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The `usage` object of a Responses API response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    helexa_timing: HelexaTiming
    helexa_cache_miss: NotRequired[CacheMiss]


class TopLogprob(TypedDict):
    """A likely token at a position of a Responses API output."""

    token: str
    bytes: list[int]
    logprob: float


class Logprob(TopLogprob):
    """A token of a Responses API output, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class OutputText(TypedDict):
    """The only content part of a message in a Responses API output.

    `logprobs` is a JSON-encoded list of `Logprob`.
    """

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: orjson.Fragment


class SummaryText(TypedDict):
    """The only summary part of a reasoning item in a Responses API output."""

    type: Literal["summary_text"]
    text: str


def output_text(text: str, logprobs: orjson.Fragment) -> OutputText:
    """Return the content part of a Responses API output message; its text is `text`."""
    return OutputText(type="output_text", annotations=[], logprobs=logprobs, text=text)


def summary_text(text: str) -> SummaryText:
    """Return the summary part of a reasoning item; its text is `text`."""
    return SummaryText(type="summary_text", text=text)


def response_usage(
    input_tokens: int,
    output_tokens: int,
    *,
    cached_tokens: int,
    reasoning_tokens: int,
    prefill_ms: float,
    decode_ms: float,
    miss: CacheMiss | None = None,
) -> ResponseUsage:
    """Return the `usage` object of a Responses API response.

    `input_tokens` includes cached tokens, and `output_tokens` includes reasoning tokens.
    """
    result = ResponseUsage(
        input_tokens=input_tokens,
        input_tokens_details={"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        output_tokens=output_tokens,
        output_tokens_details={"reasoning_tokens": reasoning_tokens},
        total_tokens=input_tokens + output_tokens,
        helexa_timing=HelexaTiming(
            prefill_ms=round(prefill_ms), decode_ms=round(decode_ms), prefill_tokens=input_tokens - cached_tokens
        ),
    )
    if miss is not None:
        result["helexa_cache_miss"] = miss
    return result


def response_of(item: str) -> str:
    """Return the id of the response that contains the item with the id `item`.

    For an invalid item id, the result is an id that no response has.
    """
    return f"resp_{''.join(item.split('_')[1:2])}"


class ResponseItem(ABC):
    """Base class of the output items of a response in the Responses API.

    Args:
        stem: random string that the ids of the response and of all its items contain.
        index: position of the item among the output items of the response.
    """

    prefix: ClassVar[str]

    def __init__(self, stem: str, index: int) -> None:
        self.id = f"{self.prefix}_{stem}_{index}"
        self.index = index

    @abstractmethod
    def value(self, status: ItemStatus) -> dict[str, Any]:
        """Return the item with its content so far, and the status `status`."""

    @abstractmethod
    def beginnings(self) -> list[Event]:
        """Return the stream events that come directly after `response.output_item.added`."""

    @abstractmethod
    def endings(self) -> list[Event]:
        """Return the stream events that come directly before `response.output_item.done`."""

    def opening(self) -> list[Event]:
        """Return the events that begin the item, `response.output_item.added` first."""
        added = {"type": "response.output_item.added", "output_index": self.index, "item": self.value("in_progress")}
        return [added, *self.beginnings()]

    def closing(self, status: ItemStatus) -> tuple[list[Event], dict[str, Any]]:
        """Return the events that end the item with `status`, and the complete item."""
        value = self.value(status)
        return [
            *self.endings(),
            {"type": "response.output_item.done", "output_index": self.index, "item": value},
        ], value

    def _event(self, kind: str, **members: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **members}


class ReasoningItem(ResponseItem):
    """A Responses API output item with the model's reasoning."""

    prefix = "rs"

    # The reasoning is sent as a summary, because clients display only summaries.
    def __init__(self, stem: str, index: int) -> None:
        super().__init__(stem, index)
        self._texts: list[str] = []

    def add(self, text: str) -> Event:
        """Append a chunk of reasoning to the item and return its stream event."""
        self._texts.append(text)
        return self._event("reasoning_summary_text.delta", summary_index=0, delta=text)

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """Return the item with the reasoning so far, and the status `status`."""
        summary = [summary_text("".join(self._texts))] if self._texts else []
        return {"id": self.id, "type": "reasoning", "summary": summary, "status": status}

    def beginnings(self) -> list[Event]:
        """Return the stream event that begins the summary."""
        return [self._event("reasoning_summary_part.added", summary_index=0, part=summary_text(""))]

    def endings(self) -> list[Event]:
        """Return the stream events that end the summary."""
        text = "".join(self._texts)
        return [
            self._event("reasoning_summary_text.done", summary_index=0, text=text),
            self._event("reasoning_summary_part.done", summary_index=0, part=summary_text(text)),
        ]


class MessageItem(ResponseItem):
    """A Responses API output item with the text of the answer."""

    prefix = "msg"

    def __init__(self, stem: str, index: int) -> None:
        super().__init__(stem, index)
        self._texts: list[str] = []
        self._logprobs = Encoded()

    @property
    def text(self) -> str:
        """The text that has been added to the message so far."""
        return "".join(self._texts)

    def add(self, text: str, logprobs: Iterable[Logprob] = ()) -> Event:
        """Append text and its log-probabilities, and return the stream event."""
        first_new = len(self._logprobs)
        for entry in logprobs:
            self._logprobs.add(entry)
        self._texts.append(text)
        new_logprobs = self._logprobs.fragment(first_new)
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=new_logprobs)

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """Return the message as JSON; `content` is empty if `status` is `in_progress`."""
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def beginnings(self) -> list[Event]:
        """Return the stream event that begins the message's only content part."""
        return [self._event("content_part.added", content_index=0, part=output_text("", Encoded().fragment()))]

    def endings(self) -> list[Event]:
        """Return the stream events that end the message's only content part."""
        part = self._part()
        return [
            self._event("output_text.done", content_index=0, text=part["text"], logprobs=self._logprobs.fragment()),
            self._event("content_part.done", content_index=0, part=part),
        ]

    def _part(self) -> Any:
        return output_text(self.text, self._logprobs.fragment())


class CallItem(ResponseItem):
    """A Responses API output item with a tool call.

    Its final status is `completed` if its arguments are a JSON object.
    """

    prefix = "fc"

    def __init__(self, stem: str, index: int, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(stem, index)
        self._call = {"call_id": call_id, "name": name}
        if namespace is not None:
            self._call["namespace"] = namespace
        self._arguments: list[str] = []

    def add(self, arguments: str) -> Event:
        """Append a chunk of the arguments to the call and return its stream event."""
        self._arguments.append(arguments)
        return self._event("function_call_arguments.delta", delta=arguments)

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """Return the call as a JSON object, with the arguments so far.

        If `status` is `in_progress`, the object has this status. Otherwise, its status is `completed` if the arguments
        are a JSON object, else `incomplete`.
        """
        arguments = "".join(self._arguments)
        if status != "in_progress":
            status = "completed" if _is_object(arguments) else "incomplete"
        return {"id": self.id, "type": "function_call", "status": status, **self._call, "arguments": arguments}

    def beginnings(self) -> list[Event]:
        """Return no events, because a tool call has no content parts."""
        return []

    def endings(self) -> list[Event]:
        """Return the stream event that ends the arguments."""
        arguments = "".join(self._arguments)
        return [self._event("function_call_arguments.done", name=self._call["name"], arguments=arguments)]


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


class CustomCallItem(CallItem):
    """A Responses API output item with a call of a custom tool, whose input is text.

    The model writes the input as an argument of a function. The input is therefore known only at the end of the call.
    """

    prefix = "ctc"

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """Return the call as JSON; its input is empty while the call is in progress."""
        text = "" if status == "in_progress" else self._input()
        return {"id": self.id, "type": "custom_tool_call", "status": status, **self._call, "input": text}

    def endings(self) -> list[Event]:
        """Return the stream events with the input."""
        text = self._input()
        return [
            self._event("custom_tool_call_input.delta", delta=text),
            self._event("custom_tool_call_input.done", input=text),
        ]

    def _input(self) -> str:
        text = "".join(self._arguments)
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            return text  # some models write the input itself, not a JSON object
        value = arguments.get("input") if isinstance(arguments, dict) else arguments
        return value if isinstance(value, str) else text


class ResponseOutput:
    """Builds the output items of a Responses API response one by one.

    A method that begins an item first completes the previous item, and also returns the events that end it.
    """

    def __init__(
        self, stem: str, namespaced: Mapping[str, tuple[str, str]], custom: Collection[str] = frozenset()
    ) -> None:
        self.items: list[dict[str, Any]] = []  # the completed items, as JSON objects
        self._stem = stem  # random string that the ids of the response and of all its items contain
        # namespace and name of each function in a namespace, by the name that the model uses
        self._namespaced = namespaced
        self._custom = custom  # names that the model uses for custom tools
        self._item: ResponseItem | None = None
        self._answered = False  # whether the output has a message or a call

    def add_text(self, text: str, logprobs: Iterable[Logprob] = ()) -> list[Event]:
        """Add text to the current or a new message, and return the stream events."""
        if isinstance(self._item, MessageItem):
            return [self._item.add(text, logprobs)]
        message = MessageItem(self._stem, self._next)
        return [*self._open(message), message.add(text, logprobs)]

    def add_reasoning(self, text: str) -> list[Event]:
        """Add reasoning to the current or a new item, and return the stream events."""
        if isinstance(self._item, ReasoningItem):
            return [self._item.add(text)]
        reasoning = ReasoningItem(self._stem, self._next)
        return [*self._open(reasoning), reasoning.add(text)]

    def begin_call(self, call_id: str, name: str) -> list[Event]:
        """Begin a tool call, and return the first stream events of the call."""
        namespace, own_name = self._namespaced.get(name, (None, name))
        kind = CustomCallItem if name in self._custom else CallItem
        return self._open(kind(self._stem, self._next, call_id, own_name, namespace))

    def add_arguments(self, arguments: str) -> list[Event]:
        """Add arguments to the current tool call, and return the stream events.

        Call `begin_call` first. For a custom tool, there are no events until the call ends.
        """
        assert isinstance(self._item, CallItem)
        event = self._item.add(arguments)
        return [] if isinstance(self._item, CustomCallItem) else [event]

    def was_reasoning(self) -> None:
        """Replace the current message by a reasoning item; not permitted in a stream."""
        if isinstance(self._item, MessageItem):
            reasoning = ReasoningItem(self._stem, self._item.index)
            reasoning.add(self._item.text)
            self._item = reasoning
            self._answered = any(item["type"] != "reasoning" for item in self.items)

    def end(self, status: ItemStatus) -> list[Event]:
        """Complete the last item, and return the remaining events of the items.

        If the output has neither a message nor a call, an empty message is added.
        """
        closed = self._close(status)
        if self._answered:
            return closed
        return [*closed, *self._open(MessageItem(self._stem, self._next)), *self._close(status)]

    @property
    def _next(self) -> int:
        return len(self.items) + (self._item is not None)

    def _open(self, item: ResponseItem) -> list[Event]:
        closed = self._close("completed")
        self._item = item
        self._answered = self._answered or not isinstance(item, ReasoningItem)
        return [*closed, *item.opening()]

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._item is None:
            return []
        events, value = self._item.closing(status)
        self.items.append(value)
        self._item = None
        return events
