"""Base classes of built-in tools, whose arguments are declared as a msgspec type."""

from typing import Any

import msgspec
from msgspec import Struct

from helexa.acp.conversation import CardContent, Location, Text, ToolKind
from helexa.acp.host.boundary import OutOfBounds
from helexa.acp.host.host import ToolError
from helexa.acp.tools.excerpt import ends, fenced
from helexa.acp.tools.tool import Act, Reads, ToolContext

_SHOWN_BYTES = 8_000


class Arguments(Struct, forbid_unknown_fields=True):
    """Base class of the types that declare a tool's arguments."""


class BuiltIn:
    """Base class of built-in tools, which implements most methods of `Tool`.

    Subclasses set the name, the description and the type of the arguments. Subclasses that write files or run commands
    override `act`.
    """

    name: str
    description: str
    kind: ToolKind
    arguments: type[Arguments]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments, derived from the argument type."""
        (_,), components = msgspec.json.schema_components([self.arguments], ref_template="{name}")
        return _inlined(components[self.arguments.__name__], components)

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validate the arguments and return them with the types of the schema."""
        present = {name: value for name, value in arguments.items() if value is not None}
        try:
            return msgspec.to_builtins(msgspec.convert(present, self.arguments, strict=False))
        except (msgspec.ValidationError, ValueError) as error:
            known = ", ".join(self.arguments.__struct_fields__)
            raise ToolError(f"the arguments of {self.name} are invalid: {error}; its arguments are: {known}") from error

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """Return the file in the argument `path`, if the tool has this argument."""
        if "path" not in arguments:
            return ()
        try:
            path = context.boundary.resolve(arguments["path"]).path
        except OutOfBounds:
            return ()
        return (Location(str(path), arguments.get("line")),)

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return an empty tuple: no preview by default."""
        return ()

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call for the permission rules: it only reads (`Reads`).

        Raises:
            OutOfBounds: the argument `path` is outside the session's folders.
        """
        if "path" not in arguments:
            return Reads()
        target = context.boundary.resolve(arguments["path"])
        return Reads(target if target.secret and not target.is_folder() else None)


def as_block(content: str) -> tuple[CardContent, ...]:
    """Return the text as a Markdown code block, shortened if it is long."""
    return (Text(fenced(ends(content, _SHOWN_BYTES))),)


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    """Return a JSON Schema without titles and without references."""
    match schema:
        case {"$ref": name}:
            return _inlined(components[name], components)
        case dict():
            # Small models and grammar compilers handle schemas without titles and references better.
            return {key: _inlined(value, components) for key, value in schema.items() if key != "title"}
        case list():
            return [_inlined(value, components) for value in schema]
    return schema
