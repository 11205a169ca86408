"""Configuration of the MCP servers that a client passes to a session."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server process that communicates over its standard streams. `env` may contain secrets."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server reached by streamable HTTP or by SSE. `headers` may contain secrets."""

    name: str
    url: str
    transport: Literal["http", "sse"] = "http"
    headers: dict[str, str] = field(default_factory=dict, repr=False)


McpServer = StdioServer | HttpServer
