"""Tools as OpenAI's Responses have them: flat or in namespaces, where chat completions wrap functions."""

from collections.abc import Iterable, Sequence
from typing import Any

from helexa.core.errors import invalid_body, unsupported_parameter

Tool = dict[str, Any]

_FUNCTION = ("name", "description", "parameters", "strict")
_UNASKED = frozenset({"web_search", "web_search_preview"})  # agents offer it by themselves, and do without


def functions(tools: Sequence[Tool] | None) -> list[tuple[str | None, Tool]]:
    """The functions that are on offer, each with the namespace it is from, if any.

    A search of the web, which models of others can do, is left out.

    Raises:
        ApiError: 400 `unsupported_parameter` for other tools, and for a function without a name, or with another's.
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
            case {"type": "function", "function": {"name": str()} as function}:  # as chat completions have it
                yield namespace, _shown(function)
            case {"type": "function", "name": str()}:
                yield namespace, _shown(tool)
            case {"type": "function"}:
                raise invalid_body(f"{path}.name: must be a string", f"{path}.name")
            case {"type": "namespace", "name": str(name), "tools": list(inner_tools)} if namespace is None:
                yield from _functions(inner_tools, f"{path}.tools", name)
            case {"type": str(kind)} if kind in _UNASKED:
                continue
            case {"type": str(kind)}:
                message = f"'{path}': tools of type {kind[:80]!r} are not supported, functions are"
                raise unsupported_parameter("tools", message)
            case _:
                raise invalid_body(f"{path}: must be an object with a 'type'", path)


def _shown(function: Tool) -> Tool:
    return {"type": "function", **{key: function.get(key) for key in _FUNCTION}}


def chat_tools(tools: Sequence[Tool] | None, allowed: set[str] | None = None) -> list[Tool]:
    """The functions as chat completions have them; those with `allowed` names only, if any are given.

    Raises:
        ApiError: as `functions` does.
    """
    return [
        {"type": "function", "function": {key: tool[key] for key in _FUNCTION if tool[key] is not None}}
        for _, tool in functions(tools)
        if allowed is None or tool["name"] in allowed
    ]


def chat_choice(choice: str | dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, set[str] | None]:
    """The choice of a tool as chat completions have it, and the names of the tools that may be called, if not all.

    Raises:
        ApiError: 400 `unsupported_parameter` or 400 `invalid_request_body`.
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
