"""Adapts a translated chat request to third-party backends such as vLLM or llama.cpp."""

import orjson


def strict_body(body: bytes) -> bytes:
    """Convert the arguments of all tool calls in a chat request from objects to JSON text, as OpenAI's API requires.

    The translated chat request contains objects, because chat templates need objects. Only helexa's own nodes accept
    objects; third-party backends require JSON text.
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
