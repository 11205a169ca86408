"""Converts tools of the Responses API to tools of chat completions.

In the Responses API, function tools are flat objects, which may be grouped in namespaces. In chat completions, each
tool contains its function as a nested object.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from helexa.core.errors import invalid_body, unsupported_parameter

Tool = dict[str, Any]

_FUNCTION = ("name", "description", "parameters", "strict")
_IGNORED = frozenset({"web_search", "web_search_preview"})  # agents offer these tools by default and work without them


def functions(tools: Sequence[Tool] | None) -> list[tuple[str | None, Tool]]:
    """Return the function tools as pairs of a namespace (or None) and a function. Web search tools are ignored.

    Raises:
        ApiError: 400 `unsupported_parameter`: a tool is neither a function nor a web search tool. 400
            `invalid_request_body`: a tool is malformed, or two functions have the same name.
    """
    tool_functions = list(_functions(tools or (), "tools", None))
    names: set[str] = set()
    for _, function in tool_functions:
        if function["name"] in names:
            raise invalid_body(f"tools: there are several functions {function['name'][:80]!r}", "tools")
        names.add(function["name"])
    return tool_functions


def _functions(tools: Sequence[Any], field: str, namespace: str | None) -> Iterable[tuple[str | None, Tool]]:
    for index, tool in enumerate(tools):
        path = f"{field}.{index}"
        match tool:
            case {"type": "function", "function": {"name": str()} as function}:  # the form of chat completions
                yield namespace, _normalized(function)
            case {"type": "function", "name": str()}:
                yield namespace, _normalized(tool)
            case {"type": "function"}:
                raise invalid_body(f"{path}.name: must be a string", f"{path}.name")
            case {"type": "namespace", "name": str(name), "tools": list(inner_tools)} if namespace is None:
                yield from _functions(inner_tools, f"{path}.tools", name)
            case {"type": str(kind)} if kind in _IGNORED:
                continue
            case {"type": str(kind)}:
                message = f"'{path}': tools of type {kind[:80]!r} are not supported, functions are"
                raise unsupported_parameter("tools", message)
            case _:
                raise invalid_body(f"{path}: must be an object with a 'type'", path)


def _normalized(function: Tool) -> Tool:
    return {"type": "function", **{key: function.get(key) for key in _FUNCTION}}


def chat_tools(tools: Sequence[Tool] | None, allowed: set[str] | None = None) -> list[Tool]:
    """Convert function tools to the format of chat completions.

    If `allowed` is not None, return only the functions with these names.

    Raises:
        ApiError: 400: a tool is malformed or not supported, or two functions have the same name.
    """
    return [
        {"type": "function", "function": {key: tool[key] for key in _FUNCTION if tool[key] is not None}}
        for _, tool in functions(tools)
        if allowed is None or tool["name"] in allowed
    ]


def chat_choice(choice: str | dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, set[str] | None]:
    """Convert `tool_choice` to the format of chat completions.

    Returns:
        The tool choice, and the names of the tools that the model may call. The names are None if all tools are
        allowed.

    Raises:
        ApiError: 400: the choice is malformed (`invalid_request_body`) or not supported (`unsupported_parameter`).
    """
    if choice is None or isinstance(choice, str):
        return choice, None
    match choice:
        case {"type": "function", "name": str(name)} | {"type": "function", "function": {"name": str(name)}}:
            return {"type": "function", "function": {"name": name}}, None
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return mode, {
                tool["name"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)
            }
        case {"type": "function" | "allowed_tools"}:
            raise invalid_body("tool_choice: malformed", "tool_choice")
        case _:
            kind = repr(str(choice.get("type"))[:80])
            raise unsupported_parameter("tool_choice", f"'tool_choice' of type {kind} is not supported")
