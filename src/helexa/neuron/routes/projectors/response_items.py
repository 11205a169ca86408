"""The items of a response while they are made: reasoning, messages and calls, and the events that tell of them."""

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from helexa.core.wire.responses.output import Event, ItemStatus, Logprob, output_text, summary_text
from helexa.neuron.events import ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta, ToolCallStart
from helexa.neuron.routes.projectors.projector import Encoded


def response_of(item: str) -> str:
    """The id of the response that the item with this id is of, if it is one."""
    return f"resp_{''.join(item.split('_')[1:2])}"


class ResponseItem(ABC):
    """One item.

    Args:
        stem: what its id has in common with those of the other items.
        index: its place among them.
    """

    prefix: ClassVar[str]

    def __init__(self, stem: str, index: int) -> None:
        self.id = f"{self.prefix}_{stem}_{index}"
        self.index = index

    @abstractmethod
    def value(self, status: ItemStatus) -> dict[str, Any]:
        """The item as far as it has come."""

    @abstractmethod
    def beginnings(self) -> list[Event]:
        """What comes after `response.output_item.added`."""

    @abstractmethod
    def endings(self) -> list[Event]:
        """What comes before `response.output_item.done`."""

    def opening(self) -> list[Event]:
        """The events with which it begins."""
        added = {"type": "response.output_item.added", "output_index": self.index, "item": self.value("in_progress")}
        return [added, *self.beginnings()]

    def closing(self, status: ItemStatus) -> tuple[list[Event], dict[str, Any]]:
        """The events with which it ends, and the whole item."""
        value = self.value(status)
        return [
            *self.endings(),
            {"type": "response.output_item.done", "output_index": self.index, "item": value},
        ], value

    def _event(self, kind: str, **members: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **members}


class ReasoningItem(ResponseItem):
    """What the model thinks, shown as a summary: the one kind of reasoning that clients know how to show."""

    prefix = "rs"

    def __init__(self, stem: str, index: int) -> None:
        super().__init__(stem, index)
        self._texts: list[str] = []

    def add(self, delta: ReasoningDelta) -> Event:
        """Take the next piece."""
        self._texts.append(delta.text)
        return self._event("reasoning_summary_text.delta", summary_index=0, delta=delta.text)

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """The item as far as it has come."""
        summary = [summary_text("".join(self._texts))] if self._texts else []
        return {"id": self.id, "type": "reasoning", "summary": summary, "status": status}

    def beginnings(self) -> list[Event]:
        """Its part begins."""
        return [self._event("reasoning_summary_part.added", summary_index=0, part=summary_text(""))]

    def endings(self) -> list[Event]:
        """Its part ends."""
        text = "".join(self._texts)
        return [
            self._event("reasoning_summary_text.done", summary_index=0, text=text),
            self._event("reasoning_summary_part.done", summary_index=0, part=summary_text(text)),
        ]


class MessageItem(ResponseItem):
    """What the model says."""

    prefix = "msg"

    def __init__(self, stem: str, index: int) -> None:
        super().__init__(stem, index)
        self._texts: list[str] = []
        self._logprobs = Encoded()

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def add(self, delta: TextDelta) -> Event:
        """Take the next piece."""
        before = len(self._logprobs)
        for one in delta.logprobs:
            self._logprobs.add(_logprob(one))
        self._texts.append(delta.text)
        logprobs = self._logprobs.fragment(before)
        return self._event("output_text.delta", content_index=0, delta=delta.text, logprobs=logprobs)

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """The item as far as it has come."""
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def beginnings(self) -> list[Event]:
        """Its part begins."""
        return [self._event("content_part.added", content_index=0, part=output_text("", Encoded().fragment()))]

    def endings(self) -> list[Event]:
        """Its part ends."""
        part = self._part()
        return [
            self._event("output_text.done", content_index=0, text=part["text"], logprobs=self._logprobs.fragment()),
            self._event("content_part.done", content_index=0, part=part),
        ]

    def _part(self) -> Any:
        return output_text(self.text, self._logprobs.fragment())


class CallItem(ResponseItem):
    """A call of a function. It is incomplete, whatever else ended, unless its arguments are an object."""

    prefix = "fc"

    def __init__(self, stem: str, index: int, start: ToolCallStart, namespace: str | None) -> None:
        super().__init__(stem, index)
        self._call = {"call_id": start.id, "name": start.name}
        if namespace is not None:
            self._call["namespace"] = namespace
        self._arguments: list[str] = []

    def add(self, delta: ToolCallDelta) -> Event:
        """Take the next piece of the arguments."""
        self._arguments.append(delta.arguments)
        return self._event("function_call_arguments.delta", delta=delta.arguments)

    def value(self, status: ItemStatus) -> dict[str, Any]:
        """The item as far as it has come."""
        arguments = "".join(self._arguments)
        if status != "in_progress":
            status = "completed" if _is_object(arguments) else "incomplete"
        return {"id": self.id, "type": "function_call", "status": status, **self._call, "arguments": arguments}

    def beginnings(self) -> list[Event]:
        """Nothing more."""
        return []

    def endings(self) -> list[Event]:
        """The arguments are whole."""
        arguments = "".join(self._arguments)
        return [self._event("function_call_arguments.done", name=self._call["name"], arguments=arguments)]


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _logprob(one: TokenLogprob) -> Logprob:
    top: Any = [{"token": token, "bytes": list(raw), "logprob": logprob} for token, raw, logprob in one.top]
    return Logprob(token=one.token, bytes=list(one.bytes), logprob=one.logprob, top_logprobs=top)
