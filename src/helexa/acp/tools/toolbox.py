"""The tools of one session."""

import asyncio
from collections.abc import Sequence

from helexa.acp.config import Mode
from helexa.acp.tools.bash import Bash
from helexa.acp.tools.files.edit_file import EditFile
from helexa.acp.tools.files.read_file import ReadFile
from helexa.acp.tools.files.write_file import WriteFile
from helexa.acp.tools.mcp import tools as mcp_tools
from helexa.acp.tools.mcp.server import McpServer
from helexa.acp.tools.search.glob import Glob
from helexa.acp.tools.search.grep import Grep
from helexa.acp.tools.search.list_dir import ListDir
from helexa.acp.tools.todo import Todo
from helexa.acp.tools.tool import Tool, ToolContext


async def open_toolbox(context: ToolContext, servers: Sequence[McpServer] = ()) -> "Toolbox":
    """Return the tools of a session: the built-in tools and the tools of its MCP servers.

    MCP servers that cannot be started or reached within a time limit are left out.
    """
    tools: list[Tool] = [ReadFile(), ListDir(), Glob(), Grep(), WriteFile(), EditFile(), Bash(), Todo()]
    if context.settings.allow_fetch:
        from helexa.acp.tools.web.fetch import Fetch

        tools.append(Fetch())
    connections, warnings = await mcp_tools.connect(servers, context.cwd)
    return Toolbox(tools, connections, tuple(warnings))


class Toolbox:
    """The tools of one session: the built-in tools and the tools of MCP servers.

    Attributes:
        warnings: an error message for each MCP server that could not be started or connected.
    """

    def __init__(self, tools: list[Tool], connections: list[mcp_tools.Connection], warnings: tuple[str, ...]) -> None:
        self.warnings = warnings
        self._connections = connections
        self._servers_tools = mcp_tools.unique_tools(connections, (tool.name for tool in tools))
        self._tools = {tool.name: tool for tool in (*tools, *self._servers_tools)}

    def tools(self, mode: Mode) -> tuple[Tool, ...]:
        """Return the tools that the model may call in the permission mode `mode`.

        In plan mode, `bash` and all MCP tools that are not read-only are omitted.
        """
        if mode != "plan":
            return tuple(self._tools.values())
        changing = {"bash", *(tool.name for tool in self._servers_tools if not tool.only_reads)}
        return tuple(tool for name, tool in self._tools.items() if name not in changing)

    def find(self, name: str) -> Tool | None:
        """Return the tool with this name, or None if there is no such tool."""
        return self._tools.get(name)

    async def close(self) -> None:
        """Close the connections to all MCP servers of the session, and end the servers that the agent started."""
        await asyncio.gather(*(connection.close() for connection in self._connections))
