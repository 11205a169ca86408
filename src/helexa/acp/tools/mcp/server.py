"""MCP servers that the client hands to a session."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server to start; it speaks over its standard streams. What is in `env` may be secret."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server to reach by streamable HTTP, or by the older SSE. What is in `headers` may be secret."""

    name: str
    url: str
    transport: Literal["http", "sse"] = "http"
    headers: dict[str, str] = field(default_factory=dict, repr=False)


McpServer = StdioServer | HttpServer
