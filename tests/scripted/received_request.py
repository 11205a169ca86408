"""A request that a scripted endpoint received, with the same properties for all API formats."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scripted.script_steps import Json

Entry = tuple[str, ...]


@dataclass(frozen=True)
class ReceivedRequest:
    """A received request."""

    path: str
    body: Json
    headers: Mapping[str, str]

    @property
    def tools(self) -> list[str]:
        """Names of the offered tools, in order."""
        return [(tool.get("function") or tool)["name"] for tool in self.body.get("tools", ())]

    @property
    def system(self) -> str:
        """The system prompt."""
        if "instructions" in self.body:
            return self.body["instructions"]
        reported = (message["content"] for message in self.body["messages"] if message["role"] == "system")
        return self.body.get("system") or next(reported, "")

    @property
    def conversation(self) -> list[Entry]:
        """(role, text or `image`), (`call`, name, arguments) or (`result`, text) each: the same in each API."""
        if "input" in self.body:
            return list(_of_items(self.body["input"]))
        return [entry for message in self.body["messages"] for entry in _of_message(message)]

    @property
    def results(self) -> list[str]:
        """Texts of the tool results."""
        return [entry[1] for entry in self.conversation if entry[0] == "result"]


def _of_items(items: list[Json]) -> Iterator[Entry]:
    for item in items:
        if item["type"] == "message":
            for part in item["content"]:
                yield item["role"], part.get("text") or "image"
        elif item["type"] == "function_call":
            yield "call", item["name"], item["arguments"]
        elif item["type"] == "function_call_output":
            yield "result", item["output"]


def _of_message(message: Json) -> Iterator[Entry]:
    role = message["role"]
    if role == "tool":
        yield "result", message["content"]
    elif role != "system":
        for part in _parts(message["content"]):
            if part["type"] == "tool_use":
                yield "call", part["name"], json.dumps(part["input"])
            elif part["type"] == "tool_result":
                yield "result", "".join(inner.get("text", "") for inner in _parts(part["content"]))
            elif part["type"] in ("text", "image", "image_url"):
                yield role, part.get("text", "image")
        for call in message.get("tool_calls", ()):
            yield "call", call["function"]["name"], call["function"]["arguments"]


def _parts(content: Any) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
