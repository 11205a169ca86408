"""Adapts a translated request to third-party backends."""

import orjson


def strict_body(body: bytes) -> bytes:
    """Return the chat request with tool call arguments as JSON text, as OpenAI's API requires.

    Helexa's nodes accept objects too, which chat templates need.
    """
    if b'"tool_calls"' not in body:
        return body
    chat = orjson.loads(body)
    for message in chat["messages"]:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = orjson.dumps(function["arguments"]).decode()
    return orjson.dumps(chat)
