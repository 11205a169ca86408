"""An MCP server with a few tools, good and bad; run as a script it speaks over its standard streams."""

import base64
import os

from mcp.server.mcpserver import MCPServer
from mcp_types import ImageContent, TextContent, ToolAnnotations

server = MCPServer("example")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def environment() -> str:
    """Names and values of the environment."""
    return "\n".join(f"{name}={value}" for name, value in os.environ.items())


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("out of luck")


@server.tool()
def large() -> str:
    """Ten megabytes."""
    return "x" * 10_000_000


@server.tool(name="picture.of." + "a.very." * 10 + "long.name")
def picture() -> list[TextContent | ImageContent]:
    """A picture and a word."""
    data = base64.b64encode(b"\x89PNG").decode()
    return [TextContent(type="text", text="look"), ImageContent(type="image", data=data, mime_type="image/png")]


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
