"""Output items of a response in OpenAI's Responses API (reasoning, messages, tool calls), and their stream events."""

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from helexa.core.wire.responses.output import Event, ItemStatus, Logprob, output_text, summary_text
from helexa.neuron.events import ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta, ToolCallStart
from helexa.neuron.routes.projectors.projector import Encoded


def response_of(item: str) -> str:
    """Return the id of the response that contains the item with the id `item`.

    If the item id is invalid, the result is an id that no response has.
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
        """Return the item as a JSON object, with its content so far and the status `status`."""

    @abstractmethod
    def beginnings(self) -> list[Event]:
        """Return the stream events that come directly after `response.output_item.added`."""

    @abstractmethod
    def endings(self) -> list[Event]:
        """Return the stream events that come directly before `response.output_item.done`."""

    def opening(self) -> list[Event]:
        """Return all stream events that begin the item; the first is `response.output_item.added`."""
        added = {"type": "response.output_item.added", "output_index": self.index, "item": self.value("in_progress")}
        return [added, *self.beginnings()]

    def closing(self, status: ItemStatus) -> tuple[list[Event], dict[str, Any]]:
        """Return all stream events that end the item, and the complete item as a JSON object.

        The last event is `response.output_item.done`. `status` is the final status of the item.
        """
        value = self.value(status)
        return [
            *self.endings(),
            {"type": "response.output_item.done", "output_index": self.index, "item": value},
        ], value

    def _event(self, kind: str, **members: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **members}


class ReasoningItem(ResponseItem):
    """An output item with the model's reasoning. It is sent as a summary, because clients display only summaries."""

    prefix = "rs"

    def __init__(self, stem: str, index: int) -> None:
        super().__init__(stem, index)
        self._texts: list[str] = []

    def add(self, delta: ReasoningDelta) -> Event:
        """Append a chunk of reasoning to the item and return its stream event."""
        self._texts.append(delta.text)
        return self._event("reasoning_summary_text.delta", summary_index=0, delta=delta.text)

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """Return the item as a JSON object, with the reasoning so far and the status `status`."""
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
    """An output item with the text of the answer."""

    prefix = "msg"

    def __init__(self, stem: str, index: int) -> None:
        super().__init__(stem, index)
        self._texts: list[str] = []
        self._logprobs = Encoded()

    @property
    def text(self) -> str:
        """The text that has been added to the message so far."""
        return "".join(self._texts)

    def add(self, delta: TextDelta) -> Event:
        """Append a chunk of text to the message and return its stream event."""
        first_new = len(self._logprobs)
        for entry in delta.logprobs:
            self._logprobs.add(_logprob(entry))
        self._texts.append(delta.text)
        logprobs = self._logprobs.fragment(first_new)
        return self._event("output_text.delta", content_index=0, delta=delta.text, logprobs=logprobs)

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """Return the message as a JSON object with the status `status`. It has no content if it is in progress."""
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
    """An output item with a tool call. Its final status is `completed` if its arguments are a JSON object."""

    prefix = "fc"

    def __init__(self, stem: str, index: int, start: ToolCallStart, namespace: str | None) -> None:
        super().__init__(stem, index)
        self._call = {"call_id": start.id, "name": start.name}
        if namespace is not None:
            self._call["namespace"] = namespace
        self._arguments: list[str] = []

    def add(self, delta: ToolCallDelta) -> Event:
        """Append a chunk of the arguments to the call and return its stream event."""
        self._arguments.append(delta.arguments)
        return self._event("function_call_arguments.delta", delta=delta.arguments)

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


def _logprob(entry: TokenLogprob) -> Logprob:
    top: Any = [{"token": token, "bytes": list(raw), "logprob": logprob} for token, raw, logprob in entry.top]
    return Logprob(token=entry.token, bytes=list(entry.bytes), logprob=entry.logprob, top_logprobs=top)
