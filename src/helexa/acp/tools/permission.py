"""Permission rules: a tool call is allowed, denied, or needs an answer of the user."""

from typing import Any

from helexa.acp.config import Mode
from helexa.acp.failure import ToolError
from helexa.acp.host.boundary import Place
from helexa.acp.tools.excerpt import title
from helexa.acp.tools.tool import (
    Act,
    Allowed,
    Asked,
    Calls,
    Denied,
    Fetches,
    Grants,
    Reads,
    Ruling,
    Runs,
    Scope,
    Tool,
    ToolContext,
    Writes,
)


def rule(tool: Tool, arguments: dict[str, Any], mode: Mode, context: ToolContext, grants: Grants) -> Ruling:
    """Decide about a call by the session's mode and the user's earlier answers."""
    try:
        act = tool.act(arguments, context)
    except ToolError as error:
        return Denied(str(error))
    return decide(act, mode, grants)


def decide(act: Act, mode: Mode, grants: Grants) -> Ruling:
    """Decide about an act by the session's mode and the user's earlier answers.

    An act is in one or more scopes; a question offers the first of them.
    """
    match act:
        case Reads():
            return Allowed()
        case Writes(place) if place.plans:
            return Allowed()
        case Writes(place):
            if mode == "plan":
                return Denied("In plan mode only files in the folder of plans are written.")
            scopes = _edit_scopes(place)
            free = mode == "acceptEdits" and not place.guarded
        case Runs():
            if mode == "plan":
                return Denied("In plan mode no commands are run.")
            scopes = _command_scopes(act)
            free = False
        case Fetches(host):
            scopes = (Scope("fetch", host, f"requests to {title(host)}"),)
            free = False
        case Calls(name, only_reads):
            if mode == "plan" and not only_reads:
                return Denied("In plan mode only tools that change nothing are called.")
            scopes = (Scope(name, "", title(name)),)
            free = False
    answers = [grants.ruling(scope) for scope in scopes]
    if False in answers:
        return Denied("The user has rejected this for good.")
    if free or mode == "bypassPermissions" or True in answers:
        return Allowed()
    return Asked(scopes[0])


def _edit_scopes(place: Place) -> tuple[Scope, ...]:
    """Return the folder of a file, the folders above it, and the file; a guarded file is only in its own scope."""
    file = Scope("edit_file", str(place.path), f"edits of {title(place.path.name)}")
    if place.guarded:
        return (file,)
    folders = (
        Scope("edit_file", f"{folder}/", f"edits in {title(folder.name or '/')}/") for folder in place.path.parents
    )
    return (*folders, file)


def _command_scopes(act: Runs) -> tuple[Scope, ...]:
    """Return the vetted command with any vetted arguments, and exactly this line in this folder and session."""
    line = Scope(
        "bash", f"={act.folder}={act.command.strip()}", "exactly this command, in this session", persistent=False
    )
    if act.vetted is None:
        return (line,)
    return Scope("bash", f"{act.vetted} *", f"`{act.vetted}` that only reads, in this project"), line
