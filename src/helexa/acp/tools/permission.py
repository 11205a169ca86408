"""Whether a call may do what it is about to: by itself, after asking, or not at all."""

import shlex
from dataclasses import dataclass
from typing import Any

from helexa.acp.config import Mode
from helexa.acp.failure import ToolError
from helexa.acp.host.boundary import Place
from helexa.acp.tools import command_line
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Something that an act does: any of the scopes covers it, and the user is offered one of them."""

    offer: Scope
    covering: tuple[Scope, ...]


def rule(tool: Tool, arguments: dict[str, Any], mode: Mode, context: ToolContext, grants: Grants) -> Ruling:
    """What the session's mode and the user's earlier answers say to a call."""
    try:
        act = tool.act(arguments, context)
    except ToolError as error:
        return Denied(str(error))
    return decide(act, mode, grants)


def decide(act: Act, mode: Mode, grants: Grants) -> Ruling:
    """What the session's mode and the user's earlier answers say to an act."""
    match act:
        case Reads():
            return Allowed()
        case Writes(place) if place.plans:
            return Allowed()
        case Writes(place):
            if mode == "plan":
                return Denied("In plan mode only files in the folder of plans are written.")
            whole, parts = _writing(place)
            free = mode == "acceptEdits" and not place.guarded
        case Runs(command):
            if mode == "plan":
                return Denied("In plan mode no commands are run.")
            whole, parts = _running(command)
            free = False
        case Fetches(host):
            whole, parts = Scope("fetch", host, f"requests to {title(host)}"), ()
            free = False
        case Calls(name, only_reads):
            if mode == "plan" and not only_reads:
                return Denied("In plan mode only tools that change nothing are called.")
            whole, parts = Scope(name, "", title(name)), ()
            free = False
    answers = [grants.ruling(whole), *(grants.ruling(scope) for part in parts for scope in part.covering)]
    if False in answers:
        return Denied("The user has rejected this for good.")
    if free or mode == "bypassPermissions" or grants.ruling(whole):
        return Allowed()
    missing = [part for part in parts if not any(grants.ruling(scope) for scope in part.covering)]
    if parts and not missing:
        return Allowed()
    return Asked(missing[0].offer if len(missing) == 1 else whole)


def _writing(place: Place) -> tuple[Scope, tuple[_Part, ...]]:
    """One file, or all in one of the folders above it; what is guarded is granted file by file."""
    file = Scope("edit_file", str(place.path), f"edits of {title(place.path.name)}")
    if place.guarded:
        return file, ()
    folders = tuple(
        Scope("edit_file", f"{folder}/", f"edits in {title(folder.name or '/')}/") for folder in place.path.parents
    )
    return file, (_Part(folders[0], folders),)


def _running(command: str) -> tuple[Scope, tuple[_Part, ...]]:
    """One command line as it stands, or each of its commands by its first words."""
    whole = Scope("bash", f"={command.strip()}", "exactly this command")
    commands = command_line.simple_commands(command)
    if commands is None:
        return whole, ()
    return whole, tuple(_command(words) for words in dict.fromkeys(commands))


def _command(words: tuple[str, ...]) -> _Part:
    exact = Scope("bash", f"={shlex.join(words)}", f"exactly `{title(shlex.join(words))}`")
    known = [
        Scope("bash", f"{prefix} *", f"commands that begin with `{prefix}`") for prefix in command_line.prefixes(words)
    ]
    return _Part(known[-1] if known else exact, (exact, *known))
