"""The tools of one session, and the tool todo, which shows the agent's plan."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from helexa.acp.config import Mode
from helexa.acp.conversation_and_events import PlanEntry, PlanPriority, PlanStatus, ToolKind
from helexa.acp.tools import mcp as mcp_tools
from helexa.acp.tools.bash import Bash
from helexa.acp.tools.files import EditFile, ReadFile, WriteFile
from helexa.acp.tools.mcp import McpServer
from helexa.acp.tools.search import Glob, Grep, ListDir
from helexa.acp.tools.tool_and_effects import Arguments, BuiltIn, Progress, Tool, ToolContext, ToolOutcome


class _Task(Struct, forbid_unknown_fields=True):
    content: Annotated[
        str,
        Meta(
            description="The task in a few words. Example: `Add a test for empty files`.", min_length=1, max_length=500
        ),
    ]
    status: PlanStatus = "pending"
    priority: PlanPriority = "medium"


class _Arguments(Arguments):
    tasks: Annotated[
        list[_Task],
        Meta(description="The complete list, in order. It replaces the list that you sent before.", max_length=100),
    ]


class Todo(BuiltIn):
    """The tool `todo`, with which the model sets the agent's plan (task list)."""

    name = "todo"
    description = (
        "Show your list of tasks to the user. Use it for work with several steps. "
        "Send the list again when a task changes."
    )
    kind: ToolKind = "think"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the number of completed tasks and the total number of tasks."""
        return f"Plan: {_progress(arguments['tasks'])}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Return an outcome that replaces the agent's plan by the tasks in `arguments`."""
        plan = tuple(PlanEntry(**task) for task in arguments["tasks"])
        return ToolOutcome(f"The plan is noted: {_progress(arguments['tasks'])}.", plan=plan)


def _progress(tasks: list[dict[str, Any]]) -> str:
    completed = sum(task["status"] == "completed" for task in tasks)
    return f"{completed} of {len(tasks)} tasks done"


async def open_toolbox(context: ToolContext, servers: Sequence[McpServer] = ()) -> "Toolbox":
    """Start the session's MCP servers; return their tools and the built-in tools.

    A server that cannot be started or reached in time is left out, and named in `Toolbox.warnings`. The caller must
    close the result.
    """
    tools: list[Tool] = [ReadFile(), ListDir(), Glob(), Grep(), WriteFile(), EditFile(), Bash(), Todo()]
    if context.settings.allow_fetch:
        from helexa.acp.tools.web import Fetch

        tools.append(Fetch())
    connections, warnings = await mcp_tools.connect(servers, context.cwd)
    return Toolbox(tools, connections, tuple(warnings))


class Toolbox:
    """The tools of one session: the built-in tools and the tools of MCP servers."""

    def __init__(
        self, tools: list[Tool], connections: list[mcp_tools.McpConnection], warnings: tuple[str, ...]
    ) -> None:
        self.warnings = warnings  # an error message for each MCP server that could not be started or connected
        self._connections = connections
        self._servers_tools = mcp_tools.unique_tools(connections, (tool.name for tool in tools))
        self._tools = {tool.name: tool for tool in (*tools, *self._servers_tools)}

    def tools(self, mode: Mode) -> tuple[Tool, ...]:
        """Return the tools that the model may call in the permission mode `mode`."""
        # In plan mode, nothing may change: no `bash`, and only MCP tools that are read-only.
        if mode != "plan":
            return tuple(self._tools.values())
        changing = {"bash", *(tool.name for tool in self._servers_tools if not tool.only_reads)}
        return tuple(tool for name, tool in self._tools.items() if name not in changing)

    def find(self, name: str) -> Tool | None:
        """Return the tool with this name in any permission mode, or None if none exists."""
        return self._tools.get(name)

    async def close(self) -> None:
        """Close the connections to all MCP servers, and end those that the agent started."""
        await asyncio.gather(*(connection.close() for connection in self._connections))
