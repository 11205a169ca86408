"""Short builders of Messages API requests, turns and content blocks."""

from typing import Any

from helexa.cortex.anthropic.request_settings_and_token_count import to_chat

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
ASK: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [HI]}


def chat(**fields: Any) -> dict[str, Any]:
    return to_chat(ASK | fields)


def messages(*turns: Any, **fields: Any) -> list[dict[str, Any]]:
    return chat(messages=list(turns), **fields)["messages"]


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def use(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "R0lGOD"}}
PIXEL_PART = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGOD"}}
