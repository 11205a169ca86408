"""Permission rules: whether a tool call is allowed, denied, or the user is asked."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from helexa.acp.config import Mode
from helexa.acp.conversation_and_events import Card
from helexa.acp.host import ToolError
from helexa.acp.tools.boundary_and_secrets import ResolvedPath
from helexa.acp.tools.excerpt import title
from helexa.acp.tools.tool_and_effects import Act, Calls, Fetches, Reads, Runs, Tool, ToolContext, Verdict, Writes


@dataclass(frozen=True, slots=True)
class Scope:
    """A set of tool calls to which one decision of the user applies."""

    tool: str  # name of the tool, for example `bash`
    # Which calls of the tool are in the set, for example `git status *`, or a folder for `edit_file`. An empty subject
    # means all calls of the tool.
    subject: str
    label: str  # description for the user, for example "edits in src/"


@dataclass(frozen=True, slots=True)
class Offer:
    """An answer "always allow" that a permission request offers."""

    scope: Scope  # the set of calls
    # Whether the answer is saved for later sessions of the project. Otherwise it applies to this session.
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """Decision of the permission rules: the tool call may run without asking the user."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Decision of the permission rules: the call must not run, for the given reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskUser:
    """Decision of the permission rules: ask the user, with "always allow" `offers`."""

    offers: tuple[Offer, ...]


Ruling = Allowed | Denied | AskUser


@dataclass(frozen=True, slots=True)
class PermissionRequest:
    """A request for the user's permission for a tool call."""

    call_id: str  # id of the tool call
    name: str  # name of the tool
    card: Card  # display of the call in the editor
    arguments: dict[str, Any]  # arguments of the call
    offers: tuple[Offer, ...]  # the "always allow" answers that the user can choose


PermissionCallback = Callable[[PermissionRequest], Awaitable[Verdict]]
"""Callback that asks the user for permission and returns the decision.

The callback has a time limit and raises only CancelledError. If the editor fails, the callback returns a rejection.
"""


def rule(
    tool: Tool, arguments: dict[str, Any], mode: Mode, context: ToolContext, ruling: Callable[[Scope], bool | None]
) -> Ruling:
    """Return whether a tool call is allowed or denied, or the user must be asked.

    `ruling` returns the user's earlier decision about all calls in a scope: True means always allowed, False always
    rejected, and None not decided.
    """
    try:
        act = tool.act(arguments, context)
    except ToolError as error:
        return Denied(str(error))
    return decide(act, mode, ruling)


def decide(act: Act, mode: Mode, ruling: Callable[[Scope], bool | None]) -> Ruling:
    """Return whether the effect `act` is allowed or denied, or the user must be asked.

    The result depends on the session's permission mode and on the user's earlier decisions (see `rule`). A user's
    decision applies to a scope, which is a set of calls. Several scopes can contain the same call. For example, an edit
    of a file is in the scopes of the file and of each parent folder. If the user must be asked, the permission request
    offers "always allow" for the narrowest scopes. Only the last offer of a request can be for a saved decision.
    """
    match act:
        case Reads(target):
            if target is None:
                return Allowed()
            secret = Scope("read_file", str(target.path), f"reads of {title(target.path.name)}")
            scopes, offers = (secret,), (Offer(secret),)
            allowed = False
        case Writes(target) if target.plans:
            return Allowed()
        case Writes(target):
            if mode == "plan":
                return Denied(
                    "In plan mode you can write files only in the plans folder. Write the plan in this folder."
                )
            scopes, offers = _edit_scopes(target)
            allowed = mode == "acceptEdits" and not target.guarded and not target.secret
        case Runs():
            if mode == "plan":
                return Denied("In plan mode you cannot run commands. Use the tools that read files.")
            scopes, offers = _command_scopes(act)
            allowed = False
        case Fetches(host):
            scopes, offers = _call_scopes(Scope("fetch", host, f"requests to {title(host)}"))
            allowed = False
        case Calls(name, only_reads):
            if mode == "plan" and not only_reads:
                return Denied("In plan mode you can call only tools that change nothing. Add this step to the plan.")
            scopes, offers = _call_scopes(Scope(name, "", title(name)))
            allowed = False
    answers = [ruling(scope) for scope in scopes]
    if False in answers:
        return Denied(
            "The user has chosen to always reject this call. Do not repeat the call; ask the user what to do instead."
        )
    if allowed or mode == "bypassPermissions" or True in answers:
        return Allowed()
    return AskUser(offers)


def _edit_scopes(target: ResolvedPath) -> tuple[tuple[Scope, ...], tuple[Offer, ...]]:
    """Return the scopes that contain an edit of `target`, and the offers to the user.

    The scopes are the edits in each parent folder and the edits of the file. For a file that may run code later or
    contains secrets (see `is_guarded` and `is_secret`), the only scope is the edits of the file. An "always allow" for
    edits in a whole session folder is offered for the session, but not as a saved decision.
    """
    file = Scope("edit_file", str(target.path), f"edits of {title(target.path.name)}")
    if target.guarded or target.secret:
        return (file,), (Offer(file),)
    folders = [
        Scope("edit_file", f"{folder}/", f"edits in {title(folder.name or '/')}/") for folder in target.path.parents
    ]
    saved = () if target.path.parent == target.folder else (Offer(folders[0], saved=True),)
    return (*folders, file), (Offer(file), Offer(folders[0]), *saved)


def _command_scopes(act: Runs) -> tuple[tuple[Scope, ...], tuple[Offer, ...]]:
    """Return the scopes that contain a command line, and the offers to the user.

    One scope contains only this line, in the same folder and session. If the line is vetted (known to only read files),
    another scope contains all vetted lines with the same command.
    """
    line = Scope("bash", f"={act.folder}\0{act.command}", f"exactly `{title(act.command)}`")
    if act.vetted is None:
        return (line,), (Offer(line),)
    vetted = Scope("bash", f"{act.vetted} *", f"`{act.vetted}` that only reads")
    return (line, vetted), (Offer(line), Offer(vetted), Offer(vetted, saved=True))


def _call_scopes(calls: Scope) -> tuple[tuple[Scope, ...], tuple[Offer, ...]]:
    return (calls,), (Offer(calls), Offer(calls, saved=True))
