"""Reads answers of the gateway as strict clients do, and returns what they contain."""

import json
from dataclasses import dataclass, field
from typing import Any

from emulator.quirk import Seen


@dataclass
class Answer:
    """What one answer contains.

    Attributes:
        ids: ids of the tool calls.
        usage: prompt and completion tokens, or None if the answer reports none.
        error: message of the error that the answer ends with, or None.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    ids: list[str] = field(default_factory=list[str])
    end: str | None = None
    usage: tuple[Any, Any] | None = None
    error: str | None = None

    def check(self, seen: Seen, *, whole: bool = False) -> None:
        """Raise an AssertionError that names the first difference to `seen`.

        Args:
            whole: True for an answer without streaming, which contains no text if it fails.
        """
        if seen.end == "error":
            assert self.error is not None, f"no error, but {self}"
            assert seen.error in self.error, f"the error {self.error!r} does not contain {seen.error!r}"
            assert whole or self.text == seen.text, f"the text before the error is {self.text!r}"
            return
        assert self.error is None, f"error {self.error!r}"
        assert self.text == seen.text, f"the text is {self.text!r}"
        assert self.reasoning == seen.reasoning, f"the reasoning is {self.reasoning!r}"
        assert self.calls == list(seen.calls), f"the calls are {self.calls}"
        assert len(set(self.ids)) == len(seen.calls), f"the ids are {self.ids}"
        assert all(self.ids) and "earlier" not in self.ids, f"the ids are {self.ids}"
        assert self.usage is None or {type(count) for count in self.usage} == {int}, f"the usage is {self.usage}"
        assert self.end == seen.end, f"the end is {self.end!r}"
        if seen.usage is not None:
            assert self.usage == seen.usage, f"the usage is {self.usage}"


def chat_stream(body: bytes) -> Answer:
    """Read a stream of chat completions whose client requested no usage chunk."""
    return _chat_stream(body, with_usage=False)


def chat_stream_with_usage(body: bytes) -> Answer:
    """Read a stream of chat completions whose client requested a usage chunk."""
    return _chat_stream(body, with_usage=True)


def _chat_stream(body: bytes, *, with_usage: bool) -> Answer:
    answer, parts = Answer(), {}
    events, roles = _data(body), []
    for data in events[:-1] if events and events[-1] == "[DONE]" else events:
        chunk = _strict(data)
        if chunk.get("error"):
            assert answer.error is None, "two errors"
            answer.error = chunk["error"]["message"]
            continue
        assert answer.error is None, "a chunk after the error"
        assert isinstance(chunk["choices"], list) and chunk["object"] == "chat.completion.chunk" and chunk["id"]
        if with_usage and chunk.get("usage"):
            assert answer.usage is None, "two token counts"  # clients such as LangChain add them up
            answer.usage = chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]
        if not chunk["choices"]:
            assert with_usage, f"a chunk without a choice: {data}"
            continue
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        roles += [delta["role"]] if delta.get("role") else []
        answer.text += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():  # joined as the SDKs do, so that no field may be repeated
            part = parts.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
            part["id"] += call.get("id") or ""
            part["name"] += call["function"].get("name") or ""
            part["arguments"] += call["function"].get("arguments") or ""
        if choice.get("finish_reason") is not None:
            assert answer.end is None, "two finish reasons"
            answer.end = choice["finish_reason"]
    assert len(roles) <= 1, f"the roles are {roles}"
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]", f"the stream ends with {events[-2:]}"
    assert sorted(parts) == list(range(len(parts))), f"the indexes are {sorted(parts)}"
    for part in parts.values():
        answer.ids.append(part["id"])
        if answer.error is None:
            answer.calls.append((part["name"], json.loads(part["arguments"])))
    return answer


def chat_whole(status: int, body: bytes) -> Answer:
    """Read a whole chat completion."""
    content = _strict(body)
    if status != 200:
        return Answer(error=content["error"]["message"])
    (choice,) = content["choices"]
    message, usage = choice["message"], content.get("usage")
    assert message["content"] is None or isinstance(message["content"], str)
    calls = message.get("tool_calls") or []
    return Answer(
        message["content"] or "",
        message.get("reasoning_content") or message.get("reasoning") or "",
        [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls],
        [call["id"] for call in calls],
        choice["finish_reason"],
        None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"]),
    )


_ENDS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}


def message_stream(body: bytes) -> Answer:
    """Read a stream of the Messages API."""
    content: dict[int, dict[str, Any]] = {}
    answer, ended = Answer(), False
    for data in _data(body):
        event = _strict(data)
        assert answer.error is None and not ended, "an event after the end"
        match event["type"]:
            case "message_start":
                answer.usage = event["message"]["usage"]["input_tokens"], 0
            case "content_block_start":
                assert event["index"] == len(content)
                content[event["index"]] = event["content_block"] | {"json": ""}
            case "content_block_delta":
                block, delta = content[event["index"]], event["delta"]
                for name, target in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    block[target] = block.get(target, "") + delta.get(name, "")
            case "message_delta":
                answer.end = _ENDS[event["delta"]["stop_reason"]]
                answer.usage = (
                    event["usage"]["input_tokens"] + event["usage"]["cache_read_input_tokens"],
                    event["usage"]["output_tokens"],
                )
            case "message_stop":
                ended = True
            case "error":
                answer.error = event["error"]["message"]
            case _:
                pass
    assert ended or answer.error is not None, "the stream has no end"
    for block in content.values():
        if block["type"] == "tool_use" and answer.error is None:
            block["input"] = json.loads(block["json"] or "{}")
    _read_content(answer, list(content.values()))
    return answer


def message_whole(status: int, body: bytes) -> Answer:
    """Read a whole answer of the Messages API."""
    message = _strict(body)
    if status != 200:
        return Answer(error=message["error"]["message"])
    usage = message["usage"]
    counted = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    answer = Answer(end=_ENDS[message["stop_reason"]], usage=counted)
    _read_content(answer, message["content"])
    return answer


def _read_content(answer: Answer, content: list[dict[str, Any]]) -> None:
    for block in content:
        match block["type"]:
            case "text":
                answer.text += block["text"]
            case "thinking":
                answer.reasoning += block["thinking"]
            case _:
                answer.calls.append((block["name"], block["input"]))
                answer.ids.append(block["id"])


def response_stream(body: bytes) -> Answer:
    """Read a stream of the Responses API."""
    events = [_strict(data) for data in _data(body)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join([event["delta"] for event in events if event["type"] == "response.output_text.delta"])
    last = events[-1]
    if last["type"] in ("error", "response.failed"):
        error = last["response"]["error"] if "response" in last else last
        return Answer(text, error=error["message"])
    assert last["type"] in ("response.completed", "response.incomplete"), f"the last event is {last['type']}"
    answer = _read_response(last["response"])
    assert text == answer.text, f"the deltas are {text!r}"
    arguments = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(
        [item["arguments"] for item in last["response"]["output"] if item["type"] == "function_call"]
    )
    return answer


def response_whole(status: int, body: bytes) -> Answer:
    """Read a whole answer of the Responses API."""
    content = _strict(body)
    return _read_response(content) if status == 200 else Answer(error=content["error"]["message"])


def _read_response(response: dict[str, Any]) -> Answer:
    answer = Answer(usage=(response["usage"]["input_tokens"], response["usage"]["output_tokens"]))
    for item in response["output"]:
        match item["type"]:
            case "message":
                answer.text += "".join([part["text"] for part in item["content"]])
            case "reasoning":
                parts = item.get("content") or item["summary"]
                answer.reasoning += "".join([part["text"] for part in parts])
            case _:
                answer.calls.append((item["name"], json.loads(item["arguments"])))
                answer.ids.append(item["call_id"])
    reasons = {"max_output_tokens": "length", "content_filter": "content_filter"}
    if response["status"] == "incomplete":
        answer.end = reasons[response["incomplete_details"]["reason"]]
    else:
        assert response["status"] == "completed"
        answer.end = "tool_calls" if answer.calls else "stop"
    return answer


def _data(body: bytes) -> list[str]:
    """Return the data of all server-sent events. Each event must end with an empty line."""
    text = body.decode()
    assert text.endswith("\n\n"), f"the stream ends with {text[-40:]!r}"
    lines = text.split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data:")]


def _strict(data: str | bytes) -> dict[str, Any]:
    def reject(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    value = json.loads(data, parse_constant=reject)
    assert isinstance(value, dict)
    return value
