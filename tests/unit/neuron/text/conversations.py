"""Test conversations in the format of OpenAI's chat API, and in the formats that `transformers` accepts."""

import copy
import json
from collections.abc import Iterator
from typing import Any

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place, in °C & <b>more</b>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "description": "How many", "default": 1},
                "unit": {"type": "string", "description": "Which", "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [WEATHER, CLOCK]

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello <b>& café</b>"}
HI = {"role": "assistant", "content": "Hi."}
WEATHER_MESSAGE = {"role": "user", "content": "Weather in Zürich? 🌤 'q' \"d\"\n{{ x }}"}
THOUGHT = {"role": "assistant", "content": "42", "reasoning_content": "Six sevens.\nYes."}
ARGUMENTS = {"city": "Chur", "days": 2, "nested": {"a": [1, None, True], "é": "<&>'"}}


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


WEATHER_CALL = call(1, "get_weather", ARGUMENTS)
CLOCK_CALL = call(2, "clock", {})
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "7 degrees"}
TIME = {"role": "tool", "tool_call_id": "call00002", "name": "clock", "content": '{"t": "12:00"}'}

CONVERSATIONS: dict[str, tuple[Messages, Tools]] = {
    "one turn": ([HELLO], None),
    "several turns": ([SYSTEM, HELLO, HI, WEATHER_MESSAGE], None),
    "tools on offer": ([SYSTEM, HELLO, HI, WEATHER_MESSAGE], TOOLS),
    "a call": ([WEATHER_MESSAGE, calling(WEATHER_CALL)], TOOLS),
    "a result": ([SYSTEM, WEATHER_MESSAGE, calling(WEATHER_CALL), RESULT], TOOLS),
    "a call with text": ([SYSTEM, WEATHER_MESSAGE, calling(WEATHER_CALL, content="Let me see."), RESULT], [WEATHER]),
    "after a call": ([SYSTEM, WEATHER_MESSAGE, calling(WEATHER_CALL), RESULT, HI, HELLO], TOOLS),
    "parallel calls": ([SYSTEM, WEATHER_MESSAGE, calling(WEATHER_CALL, CLOCK_CALL), RESULT, TIME], TOOLS),
    "several steps": ([WEATHER_MESSAGE, calling(WEATHER_CALL), RESULT, calling(CLOCK_CALL), TIME, HI, HELLO], TOOLS),
    "thinking": ([SYSTEM, HELLO, THOUGHT, WEATHER_MESSAGE], None),
    "thinking last": ([HELLO, THOUGHT], None),
    "thinking and calls": ([WEATHER_MESSAGE, calling(WEATHER_CALL, reasoning_content="I need it."), RESULT], TOOLS),
    "other names of thinking": ([HELLO, HI | {"reasoning": "a"}, HELLO, HI | {"thinking": "b"}, WEATHER_MESSAGE], None),
    "spaces": (
        [
            {"role": "system", "content": " s "},
            {"role": "user", "content": "  x \n"},
            {"role": "assistant", "content": "\n y  "},
            {"role": "user", "content": "\tz\r\n\n"},
        ],
        None,
    ),
    "empty texts": (
        [
            {"role": "system", "content": ""},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "?"},
        ],
        None,
    ),
    "a developer": ([{"role": "developer", "content": "Be brief."}, HELLO], None),
    "parts": ([SYSTEM, {"role": "user", "content": text("one", "two")}], None),
    "parts of the system": ([{"role": "system", "content": text("one", "two")}, HELLO], None),
    "parts of the assistant": ([HELLO, {"role": "assistant", "content": text("one", "two")}, WEATHER_MESSAGE], None),
    "parts of a tool": ([WEATHER_MESSAGE, calling(WEATHER_CALL), RESULT | {"content": text("one", "two")}], TOOLS),
    "unusual order": ([HI, HELLO, HELLO, SYSTEM], None),
    "empty assistant message": ([HELLO, {"role": "assistant", "content": None}, WEATHER_MESSAGE], None),
}


def on_the_wire(messages: Messages) -> Messages:
    """Return the conversation with tool-call arguments as JSON text, as in OpenAI's API."""
    return with_arguments(messages, json.dumps)


def with_arguments(messages: Messages, shape: Any) -> Messages:
    messages = copy.deepcopy(messages)
    for message in messages:
        for tool_call in message.get("tool_calls", []):
            tool_call["function"]["arguments"] = shape(tool_call["function"]["arguments"])
    return messages


def shapes(messages: Messages) -> Iterator[Messages]:
    """Yield the conversation in the formats that `transformers` accepts, the best format for most templates first."""
    joined = [
        message | {"content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    for variant in [messages] if joined == messages else [messages, joined]:
        for arguments in (dict, json.dumps):
            for content in ({}, {"content": None}, {"content": ""}):
                yield [_without_null(message, content) for message in with_arguments(variant, arguments)]


def _without_null(message: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None}
    return fields if "content" in fields else fields | (content if "tool_calls" in fields else {"content": ""})
