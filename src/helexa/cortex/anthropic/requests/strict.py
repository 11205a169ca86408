"""Adapts a translated chat request to third-party backends such as vLLM or llama.cpp."""

import orjson


def strict_body(body: bytes) -> bytes:
    """Return the chat request with the arguments of tool calls as JSON text, as OpenAI's API requires.

    Helexa's own nodes also accept the arguments as objects, because chat templates need objects.
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
