"""Configuration of the MCP servers that the editor specifies for a session."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class StdioServer:
    """An MCP server that the agent starts as a process and reaches over stdin and stdout.

    The environment variables in `env` may contain secrets.
    """

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class HttpServer:
    """An MCP server that the agent reaches by streamable HTTP or by SSE. `headers` may contain secrets."""

    name: str
    url: str
    transport: Literal["http", "sse"] = "http"
    headers: dict[str, str] = field(default_factory=dict, repr=False)


McpServer = StdioServer | HttpServer
