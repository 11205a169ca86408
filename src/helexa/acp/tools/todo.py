"""The tool `todo`: set the agent's plan (task list), which the editor shows to the user."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from helexa.acp.history import PlanEntry, PlanPriority, PlanStatus, ToolKind
from helexa.acp.tools.builtin import Arguments, BuiltIn
from helexa.acp.tools.tool import Progress, ToolContext, ToolOutcome


class _Task(Struct, forbid_unknown_fields=True):
    content: Annotated[str, Meta(description="What is to be done.", min_length=1, max_length=500)]
    status: PlanStatus = "pending"
    priority: PlanPriority = "medium"


class _Arguments(Arguments):
    tasks: Annotated[list[_Task], Meta(description="The whole list, in order, every time.", max_length=100)]


class Todo(BuiltIn):
    """The tool `todo`, with which the model sets the agent's plan (task list)."""

    name = "todo"
    description = "Show the user your list of tasks for work of several steps; send it again whenever one changes."
    kind: ToolKind = "think"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the number of completed tasks and the total number of tasks."""
        return f"Plan: {_progress(arguments['tasks'])}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Replace the agent's plan by the tasks in `arguments`."""
        plan = tuple(PlanEntry(**task) for task in arguments["tasks"])
        return ToolOutcome(f"The plan is noted: {_progress(arguments['tasks'])}.", plan=plan)


def _progress(tasks: list[dict[str, Any]]) -> str:
    completed = sum(task["status"] == "completed" for task in tasks)
    return f"{completed} of {len(tasks)} tasks done"
