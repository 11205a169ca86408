"""Permission rules: a tool call is allowed, denied, or the user must decide."""

from typing import Any

from helexa.acp.config import Mode
from helexa.acp.failure import ToolError
from helexa.acp.host.boundary import ResolvedPath
from helexa.acp.tools.excerpt import title
from helexa.acp.tools.tool import (
    Act,
    Allowed,
    AskUser,
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
    """Return whether a call is allowed or denied, or needs an answer of the user.

    The session's mode and the user's saved "always" answers (`grants`) decide.
    """
    try:
        act = tool.act(arguments, context)
    except ToolError as error:
        return Denied(str(error))
    return decide(act, mode, grants)


def decide(act: Act, mode: Mode, grants: Grants) -> Ruling:
    """Return the ruling for an act (the effect of a call), by the session's mode and the user's "always" answers.

    Several scopes can cover an act: for an edit, the file or one of its parent folders. A permission request offers the
    first scope.
    """
    match act:
        case Reads():
            return Allowed()
        case Writes(target) if target.plans:
            return Allowed()
        case Writes(target):
            if mode == "plan":
                return Denied("In plan mode only files in the folder of plans are written.")
            scopes = _edit_scopes(target)
            allowed = mode == "acceptEdits" and not target.guarded
        case Runs():
            if mode == "plan":
                return Denied("In plan mode no commands are run.")
            scopes = _command_scopes(act)
            allowed = False
        case Fetches(host):
            scopes = (Scope("fetch", host, f"requests to {title(host)}"),)
            allowed = False
        case Calls(name, only_reads):
            if mode == "plan" and not only_reads:
                return Denied("In plan mode only tools that change nothing are called.")
            scopes = (Scope(name, "", title(name)),)
            allowed = False
    answers = [grants.ruling(scope) for scope in scopes]
    if False in answers:
        return Denied("The user has permanently rejected this.")
    if allowed or mode == "bypassPermissions" or True in answers:
        return Allowed()
    return AskUser(scopes[0])


def _edit_scopes(target: ResolvedPath) -> tuple[Scope, ...]:
    """Return the scopes that cover an edit: all parent folders and the file, or only the file if it is in `.git`."""
    file = Scope("edit_file", str(target.path), f"edits of {title(target.path.name)}")
    if target.guarded:
        return (file,)
    folders = (
        Scope("edit_file", f"{folder}/", f"edits in {title(folder.name or '/')}/") for folder in target.path.parents
    )
    return (*folders, file)


def _command_scopes(act: Runs) -> tuple[Scope, ...]:
    """Return the scopes that cover a command line.

    They are its vetted (read-only) command, if any, and exactly this line in this folder and session.
    """
    line = Scope(
        "bash", f"={act.folder}={act.command.strip()}", "exactly this command, in this session", persistent=False
    )
    if act.vetted is None:
        return (line,)
    return Scope("bash", f"{act.vetted} *", f"`{act.vetted}` that only reads, in this project"), line
