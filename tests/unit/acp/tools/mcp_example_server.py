"""An MCP server over stdio with working and failing tools. The server imports no SDK, so that it starts fast."""

import json
import os
import sys
from typing import Any

_NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {"type": "object", "properties": _NUMBERS, "required": ["a", "b"]},
    },
    {"name": "environment", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "large", "inputSchema": {"type": "object"}},
    {"name": "picture.of." + "a.very." * 10 + "long.name", "inputSchema": {"type": "object"}},
    {"name": "wait", "inputSchema": {"type": "object"}},
    {"name": "die", "inputSchema": {"type": "object"}},
]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a tool, or None for a tool that never responds."""
    match name:
        case "add":
            return text_result(str(arguments["a"] + arguments["b"]))
        case "environment":
            return text_result("\n".join(f"{name}={value}" for name, value in os.environ.items()))
        case "fail":
            return text_result("out of luck") | {"isError": True}
        case "large":
            return text_result("x" * 10_000_000)
        case "wait":
            return None
        case "die":
            os._exit(3)
    picture = {"type": "image", "data": "iVBORw==", "mimeType": "image/png"}
    return {"content": [{"type": "text", "text": "look"}, picture]}


def text_result(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}


def result_of(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    match method:
        case "initialize":
            about = {"name": "example", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            return {"tools": TOOLS}
        case "tools/call":
            return call(params["name"], params.get("arguments") or {})
    raise LookupError(method)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or "method" not in request:
            continue
        response: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            result = result_of(request["method"], request.get("params") or {})
        except LookupError:
            response["error"] = {"code": -32601, "message": "Method not found"}
        else:
            if result is None:
                continue
            response["result"] = result
        print(json.dumps(response), flush=True)


if __name__ == "__main__":
    main()
