"""A translated request for servers of the OpenAI dialect that are not ours."""

import orjson


def strict_body(body: bytes) -> bytes:
    """The same chat request with the arguments of tool calls as JSON text: the only form that all servers take.

    Our own nodes are given objects, as chat templates want them.
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
