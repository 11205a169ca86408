"""Permission rules, which decide whether a tool call is allowed, is denied, or needs the user's permission."""

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
    """Return whether a tool call is allowed, is denied, or needs the user's permission.

    Args:
        tool: the called tool.
        arguments: arguments of the call.
        mode: the session's permission mode.
        context: the session's folders.
        grants: the user's earlier decisions to always allow or always reject certain calls.
    """
    try:
        act = tool.act(arguments, context)
    except ToolError as error:
        return Denied(str(error))
    return decide(act, mode, grants)


def decide(act: Act, mode: Mode, grants: Grants) -> Ruling:
    """Return whether a tool call with the effect `act` is allowed, is denied, or needs the user's permission.

    The result depends on the session's permission mode and on the user's earlier decisions in `grants`. A user's
    decision applies to a scope, which is a set of calls. Several scopes can contain the same call. For example, an edit
    of a file is in the scopes of the file and of each parent folder. If the user must be asked, the permission request
    offers "always allow" for the first scope.
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
    """Return the scopes (sets of calls) that contain an edit of the file `target`.

    The scopes are the edits in each parent folder and the edits of the file. For a file that may run code later (see
    `guarded_paths`), only the edits of the file are returned.
    """
    file = Scope("edit_file", str(target.path), f"edits of {title(target.path.name)}")
    if target.guarded:
        return (file,)
    folders = (
        Scope("edit_file", f"{folder}/", f"edits in {title(folder.name or '/')}/") for folder in target.path.parents
    )
    return (*folders, file)


def _command_scopes(act: Runs) -> tuple[Scope, ...]:
    """Return the scopes (sets of calls) that contain a shell command line.

    The last scope contains only this line, in the same folder and session. If the line is vetted (known to only read
    files), an earlier scope contains all vetted lines with the same command.
    """
    line = Scope(
        "bash", f"={act.folder}={act.command.strip()}", "exactly this command, in this session", persistent=False
    )
    if act.vetted is None:
        return (line,)
    return Scope("bash", f"{act.vetted} *", f"`{act.vetted}` that only reads, in this project"), line
