"""Tools of MCP servers, which the agent starts or connects to.

The package `mcp` takes about a second to import. It is imported only if a session has MCP servers.
"""

import asyncio
import importlib
import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from helexa.acp.conversation_and_events import CardContent, Image, Location, Text, ToolKind
from helexa.acp.host import ToolError
from helexa.acp.tools.excerpt import clipped, ends, fenced, shown_whole, title
from helexa.acp.tools.tool_and_effects import Act, Calls, Progress, ToolContext, ToolOutcome, as_block

if TYPE_CHECKING:
    import anyio
    import mcp_types
    from mcp.client import Client


@dataclass(frozen=True, slots=True)
class StdioServer:
    """An MCP server that the agent starts. The variables in `env` may be secrets."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class HttpServer:
    """An MCP server that the agent reaches over HTTP. The `headers` may be secrets."""

    name: str
    url: str
    transport: Literal["http", "sse"] = "http"
    headers: dict[str, str] = field(default_factory=dict, repr=False)


McpServer = StdioServer | HttpServer


_LOG = logging.getLogger(__name__)
_START_SECONDS = 20.0
_CALL_SECONDS = 300.0
_END_SECONDS = 6.0
_MAX_TOOLS = 128  # maximum number of tools of one server
_MAX_NAME_CHARACTERS = 64  # maximum length of tool names in the APIs of model endpoints
_MAX_DESCRIPTION = 2_000
_MAX_BYTES = 48_000
_MAX_IMAGES = 4
_MAX_IMAGE = 5 << 20


async def connect(servers: Sequence[McpServer], cwd: Path) -> tuple[list["McpConnection"], list[str]]:
    """Start or connect to all MCP servers concurrently.

    Each server has 20 seconds to start. The caller must close the returned connections.

    Returns:
        The connections, and an error message for each server that could not be started or reached.
    """
    if not servers:
        return [], []
    try:
        await asyncio.to_thread(importlib.import_module, "mcp.client")
    except ImportError:
        return [], ["MCP servers need the Python package `mcp`; install it with: pip install 'helexa[acp]'"]
    connections = [McpConnection(server, cwd) for server in servers]
    outcomes = await asyncio.gather(*(connection.open() for connection in connections), return_exceptions=True)
    warnings = [
        f"The MCP server {title(connection.name)} cannot be used: {outcome}"
        for connection, outcome in zip(connections, outcomes, strict=True)
        if outcome is not None
    ]
    return [connection for connection, outcome in zip(connections, outcomes, strict=True) if outcome is None], warnings


class McpConnection:
    """The connection of one session to one MCP server."""

    # A separate task opens and closes the connection, because the package `mcp` requires the same task for both.
    def __init__(self, server: McpServer, cwd: Path) -> None:
        self.name = server.name  # name of the server, as the editor specified it
        self.tools: list[mcp_types.Tool] = []  # tools of the server. The list is empty before `open` is called.
        self._server = server
        self._cwd = cwd
        self._client: Client | None = None
        self._scope: anyio.CancelScope | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the server or connect to it, and read the list of its tools.

        Raises:
            ToolError: the server could not be started or reached in time.
        """
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(opened))
        try:
            async with asyncio.timeout(_START_SECONDS):
                await opened
        except TimeoutError as error:
            raise ToolError(
                f"the server did not answer within {_START_SECONDS:g} s; check the command or URL of this MCP server"
            ) from error
        finally:
            if self._client is None:
                await self.close()

    async def call(self, tool: str, arguments: dict[str, Any]) -> "mcp_types.CallToolResult":
        """Call a tool of the server, and return the result.

        Raises:
            ToolError: the call failed or timed out, or the connection has ended.
        """
        if self._client is None:
            raise ToolError(
                f"the MCP server {title(self.name)} has ended; use other tools, or ask the user to open a new session"
            )
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                return await self._client.call_tool(tool, arguments)
        except TimeoutError as error:
            raise ToolError(
                f"the MCP server {title(self.name)} did not answer within {_CALL_SECONDS:g} s; try again"
            ) from error
        except Exception as error:  # any exception is a failure of this server
            raise ToolError(
                f"the MCP server {title(self.name)} failed: {_reason(error)}; correct the arguments or use other tools"
            ) from error

    async def close(self) -> None:
        """Close the connection, and end the server if the agent started it."""
        # Cancel the scope and not the task: after a cancellation of the task, the package `mcp` would leave the server
        # process running.
        if self._scope is not None:
            self._scope.cancel()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_END_SECONDS)

    async def _run(self, opened: asyncio.Future[None]) -> None:
        import anyio

        try:
            with anyio.CancelScope() as self._scope:
                async with _client(self._server, self._cwd) as client:
                    self.tools = [tool async for tool in _listed(client)]
                    if not opened.done():
                        self._client = client
                        opened.set_result(None)
                        await anyio.sleep_forever()
        except Exception as error:  # any exception is a failure of this server
            if opened.done():
                _LOG.warning(
                    "MCP server has ended server=%r error=%r; open a new session to restart this server",
                    self.name,
                    _reason(error),
                )
            else:
                opened.set_exception(ToolError(_reason(error)))
        finally:
            self._client = None


@asynccontextmanager
async def _client(server: McpServer, cwd: Path) -> AsyncIterator["Client"]:
    import httpx2
    from mcp.client import Client
    from mcp.client.sse import sse_client
    from mcp.client.stdio import StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client

    if isinstance(server, StdioServer):
        start = StdioServerParameters(command=server.command, args=list(server.args), env=dict(server.env), cwd=cwd)
        async with Client(start, cache=None) as client:
            yield client
    elif server.transport == "sse":
        async with Client(sse_client(server.url, headers=dict(server.headers)), cache=None) as client:
            yield client
    else:
        timeout = httpx2.Timeout(30, read=_CALL_SECONDS)
        async with (
            httpx2.AsyncClient(headers=server.headers, timeout=timeout) as http,
            Client(streamable_http_client(server.url, http_client=http), cache=None) as client,
        ):
            yield client


async def _listed(client: "Client") -> AsyncIterator["mcp_types.Tool"]:
    """Yield the tools of a server, at most `_MAX_TOOLS`."""
    cursor, count = None, 0
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            count += 1
            if count > _MAX_TOOLS:
                return
            yield tool
        cursor = page.next_cursor
        if not cursor or not page.tools:
            return


class McpTool:
    """A tool of an MCP server, whose name for the model contains the server's name."""

    kind: ToolKind = "other"

    def __init__(self, name: str, tool: "mcp_types.Tool", connection: McpConnection) -> None:
        self.name = name
        self.description = clipped(tool.description or tool.title or tool.name, _MAX_DESCRIPTION)
        self.schema: dict[str, Any] = {"type": "object", "properties": {}} | tool.input_schema
        self._tool = tool
        self._connection = connection

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged, because the MCP server validates them."""
        return arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the names of the server and of its tool."""
        return title(f"{self._connection.name}: {self._tool.title or self._tool.name}")

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """Return an empty tuple, because the files that the tool will change are unknown."""
        return ()

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return the arguments as JSON, for the permission request."""
        return (Text(fenced(shown_whole(json.dumps(arguments, indent=2, ensure_ascii=False)))),)

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call: it calls an MCP tool (`Calls`)."""
        return Calls(self.name, self.only_reads)

    @property
    def only_reads(self) -> bool:
        """Whether the MCP server declares that the tool changes nothing."""
        annotations = self._tool.annotations
        return annotations is not None and annotations.read_only_hint is True

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Call the tool on the MCP server, and return the text and images of the result."""
        result = await self._connection.call(self._tool.name, arguments)
        texts: list[str] = []
        images: list[Image] = []
        for block in result.content:
            if block.type == "text":
                texts.append(block.text)
            elif block.type == "image" and len(images) < _MAX_IMAGES and len(block.data) <= _MAX_IMAGE:
                images.append(Image(block.mime_type, block.data))
            elif block.type == "resource" and (text := getattr(block.resource, "text", None)) is not None:
                texts.append(f"{block.resource.uri}\n{text}")
            elif block.type == "resource_link":
                texts.append(f"[{block.name}: {block.uri}]")
            else:
                texts.append(f"[{block.type} that cannot be shown]")
        if not texts and not images and result.structured_content is not None:
            texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        content = ends("\n".join(texts), _MAX_BYTES) or "[no output]"
        shown = (*as_block(content), *images)
        return ToolOutcome(content, failed=result.is_error, shown=shown, images=tuple(images))


def unique_tools(connections: Iterable[McpConnection], used_names: Iterable[str]) -> list[McpTool]:
    """Return all tools of the MCP servers, with valid and unique names.

    No tool gets a name in `used_names`.
    """
    names = set(used_names)
    tools: list[McpTool] = []
    for connection in connections:
        for tool in connection.tools:
            name = _name(connection.name, tool.name, names)
            names.add(name)
            tools.append(McpTool(name, tool, connection))
    return tools


def _name(server: str, tool: str, used_names: set[str]) -> str:
    server, tool = (re.sub(r"[^A-Za-z0-9_-]+", "_", text) or "_" for text in (server, tool))
    stem = f"mcp__{server[:24]}__{tool}"[:_MAX_NAME_CHARACTERS]
    name, number = stem, 2
    while name in used_names:
        name = f"{stem[: _MAX_NAME_CHARACTERS - len(str(number)) - 1]}_{number}"
        number += 1
    return name


def _reason(error: BaseException) -> str:
    """Return the message of an error, or of a group's first error, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return title(str(error) or type(error).__name__, 300)
