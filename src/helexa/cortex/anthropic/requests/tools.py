"""Translates the fields `tools` and `tool_choice` of the Messages API to the format of a chat request."""

from collections.abc import Mapping
from typing import Any

from helexa.cortex.anthropic.errors import invalid_anthropic_body
from helexa.cortex.anthropic.requests.content import string

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Any) -> list[dict[str, Any]]:
    """Convert tools to OpenAI's format. A tool that is already in OpenAI's format is not changed.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: a tool is malformed, or is one of Anthropic's built-in tools.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise invalid_anthropic_body("tools", "must be a list")
    return [_chat_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]


def chat_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Convert the client's `tool_choice` to the chat request fields `tool_choice` and `parallel_tool_calls`.

    The result is empty if `choice` is None. It is also empty if `tools` is empty and `choice` does not require a tool.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: the choice is malformed, or names a tool that is not in `tools`.
    """
    if choice is None:
        return {}
    if not isinstance(choice, dict):
        raise invalid_anthropic_body("tool_choice", "must be an object")
    kind = choice.get("type")
    if kind == "tool":
        name = string(choice, "name", "tool_choice")
        if all(tool["function"].get("name") != name for tool in tools):
            raise invalid_anthropic_body("tool_choice.name", "must be the name of a tool in 'tools'")
        tool_choice: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        tool_choice = _CHOICES[kind]
    else:
        raise invalid_anthropic_body("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'")
    if not tools:
        if kind == "any":
            raise invalid_anthropic_body("tool_choice", "requires a tool, but 'tools' is empty")
        return {}
    fields = {"tool_choice": tool_choice}
    return fields | {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else fields


def _chat_tool(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid_anthropic_body(field, "must be an object")
    kind = tool.get("type")
    if kind == "function" and isinstance(tool.get("function"), dict):
        return tool
    if kind not in (None, "custom"):
        raise invalid_anthropic_body(
            f"{field}.type",
            f"{str(kind)[:80]!r} is a tool of Anthropic's servers, which is not supported; "
            "define tools by 'name' and 'input_schema'",
        )
    return {"type": "function", "function": _function(tool, field)}


def _function(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": string(tool, "name", field)}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    schema = tool.get("input_schema")
    if schema is not None and not isinstance(schema, dict):
        raise invalid_anthropic_body(f"{field}.input_schema", "must be an object")
    function["parameters"] = schema or {"type": "object"}
    if tool.get("strict") is True:
        function["strict"] = True
    return function
