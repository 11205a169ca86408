"""Tools that a request offers to the model, and the tool calls of the response."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from helexa.generation.completion import ToolCall
from helexa.generation.errors import InvalidRequestError

Tool = Callable[..., Any] | Mapping[str, Any]
"""A Python function, or a tool in the format of OpenAI's chat API."""


def tool_definitions(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """Return tools in the format of OpenAI's chat API.

    The definition of a Python function has the name of the function, the first paragraph of its docstring, and a JSON
    Schema of its parameters, which pydantic derives from their types and defaults.

    Raises:
        InvalidRequestError: an element is neither a function nor a mapping, or a parameter has no JSON Schema.
    """
    if isinstance(tools, Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequestError(
            f"tools must be a list of functions or of tools in OpenAI's format, not {type(tools).__name__}"
        )
    return tuple(dict(tool) if isinstance(tool, Mapping) else _definition(tool) for tool in tools)


def chosen_tool(choice: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """Return OpenAI's field `tool_choice` for the option `tool_choice` of the library.

    If the option is a string other than `auto`, `none` and `required`, it is the name of a tool.
    """
    if not isinstance(choice, str) or choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


def _definition(function: Any) -> dict[str, Any]:
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        raise InvalidRequestError(f"a tool must be a function or a mapping, not {type(function).__name__}")
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        parameters = TypeAdapter(function).json_schema()  # type: ignore[arg-type]
    except (PydanticUserError, NameError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InvalidRequestError(
            f"the parameters of the tool '{name}' have no JSON Schema: {reason}; change their types, or pass a mapping"
        ) from None
    if parameters.get("type") != "object":
        raise InvalidRequestError(f"the tool '{name}' has parameters without names; give each parameter a name")
    description = (inspect.getdoc(function) or "").split("\n\n")[0].strip()
    text = {"description": " ".join(description.split())} if description else {}
    return {"type": "function", "function": {"name": name, **text, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A chunk of a tool call. Only the first chunk of a call has `id` and `name`.

    Attributes:
        index: index of the call in the response.
        arguments: the next part of the JSON text of the arguments.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ToolCallReader:
    """Joins the chunks of tool calls."""

    _calls: dict[int, list[ToolCallDelta]] = field(default_factory=dict)

    def add(self, delta: ToolCallDelta) -> None:
        """Add the next chunk of a tool call."""
        self._calls.setdefault(delta.index, []).append(delta)

    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls in the order of their indexes.

        Raises:
            ValueError: the arguments of a call are not a JSON object, for example because the response was truncated.
        """
        return tuple(_call(self._calls[index]) for index in sorted(self._calls))


def _call(deltas: Iterable[ToolCallDelta]) -> ToolCall:
    id, name, text = ("".join(parts) for parts in zip(*((d.id, d.name, d.arguments) for d in deltas), strict=True))
    try:
        arguments = json.loads(text or "{}")
    except RecursionError:
        arguments = None
    except ValueError as error:
        raise ValueError(
            f"the arguments of the call of the tool '{name}' are not JSON: {error}; try again, or raise max_tokens"
        ) from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the call of the tool '{name}' are not a JSON object; try again")
    return ToolCall(id, name, arguments)
