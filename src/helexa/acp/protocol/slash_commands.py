"""The slash commands that users type in the editor."""

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from helexa.acp.config import Mode, agent_version
from helexa.acp.conversation_and_events import Cleared, Part, StopReason, Text, TextDelta
from helexa.acp.preferences import Grant
from helexa.acp.protocol.session import Session
from helexa.acp.protocol.session_options import MODES, is_mode
from helexa.acp.tools.excerpt import title

INIT_PROMPT = """\
Read this project and write the file AGENTS.md in its root folder, for coding agents. Describe:
- what the project does, and its folders
- the commands to build, run, test and check the style. Example: `make test`
- conventions that a newcomer would break

Write at most 60 lines, and only what you found in the files. If AGENTS.md exists, improve it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command."""

    about: str  # description for the user
    # function that runs the command, called with the session and the text after the command's name
    run: Callable[[Session, str], Awaitable[StopReason]]
    hint: str | None = None  # text that tells the user what to write after the command's name, or None


def find_command(parts: tuple[Part, ...]) -> tuple[Command, str] | None:
    """Return the slash command at the start of a prompt, and the text after it.

    Return None if the prompt does not begin with a known command.
    """
    first = parts[0]
    if not isinstance(first, Text) or not first.text.startswith("/"):
        return None
    name, _, argument = first.text[1:].partition(" ")
    command = _COMMANDS.get(name.strip())
    if command is None:
        return None
    later_texts = (part.text for part in parts[1:] if isinstance(part, Text))
    return command, " ".join([argument.strip(), *later_texts]).strip()


async def _compact(session: Session, argument: str) -> StopReason:
    from helexa.acp.agent.context_and_compaction import compact

    compacted = await compact(session.turn(), argument)
    return await _send_text(
        session,
        "The conversation was summarized."
        if compacted
        else "The conversation was not summarized: it is too short, or the model failed.",
    )


async def _model(session: Session, argument: str) -> StopReason:
    if not argument:
        lines = [
            f"- `{name}:{card.id}`{' (chosen)' if f'{name}:{card.id}' == str(session.choices.model) else ''}"
            for name, cards in session.models.listed().items()
            for card in cards
        ]
        return await _send_text(session, "\n".join([f"The model is `{session.choices.model}`.", "", *lines]))
    choice = session.models.parse(argument)  # cannot fail: `argument` is not empty here
    if (selection_error := session.models.selection_error(choice)) is not None:
        return await _send_text(session, f"The model is still `{session.choices.model}`: {selection_error}")
    await session.choose(model=choice)
    await session.send_choices()
    return await _send_text(session, f"The model is now `{choice}`.")


async def _mode(session: Session, argument: str) -> StopReason:
    if not is_mode(argument):
        lines = [f"- `{id}`: {about}" for id, (_, about) in MODES.items()]
        unknown = f"There is no mode {argument!r}. " if argument else ""
        return await _send_text(session, "\n".join([f"{unknown}The mode is `{session.choices.mode}`.", "", *lines]))
    await session.choose(mode=cast(Mode, argument))
    await session.send_choices()
    return await _send_text(session, f"The mode is now `{argument}`.")


async def _status(session: Session, argument: str) -> StopReason:
    choices, usage = session.choices, session.usage
    card = session.models.card(choices.model)
    lines = [
        f"helexa-acp {agent_version()}, session `{session.id}`",
        f"- folder: `{session.cwd}`",
        f"- model: `{choices.model}`, context of {card.context or 'unknown'} tokens",
        f"- mode: `{choices.mode}`, thinking: {choices.thought_level}",
    ]
    if usage is not None:
        cost = "" if usage.cost is None else f", ${usage.cost:.4f} spent"
        lines.append(f"- context: {usage.used} of {usage.size or 'unknown'} tokens used{cost}")
    lines.append(f"- permissions: {len(session.permissions.decisions())}; `/permissions` lists them")
    lines += [f"- endpoint {name}: {failure}" for name, failure in session.models.failures().items()]
    lines += [f"- {warning}" for warning in (*session.settings.warnings, *session.toolbox.warnings)]
    return await _send_text(session, "\n".join(lines))


async def _permissions(session: Session, argument: str) -> StopReason:
    decisions = session.permissions.decisions()
    action, _, number = argument.partition(" ")
    if action == "revoke" and number == "all":
        revoked = decisions
    elif action == "revoke" and number.isdecimal() and 1 <= int(number) <= len(decisions):
        revoked = [decisions[int(number) - 1]]
    elif argument:
        usage = f"Write `/permissions revoke NUMBER` with a number from 1 to {len(decisions)}, or `revoke all`."
        return await _send_text(session, usage)
    elif not decisions:
        return await _send_text(session, "You have not always allowed or rejected anything.")
    else:
        lines = [f"{index}. {_describe(grant, saved)}" for index, (grant, saved) in enumerate(decisions, 1)]
        return await _send_text(session, "\n".join([*lines, "", "`/permissions revoke NUMBER` takes one back."]))
    for grant, _ in revoked:
        await session.permissions.revoke(grant)
    lines = [f"- {_describe(grant, saved)}" for grant, saved in revoked]
    return await _send_text(session, "\n".join(["Revoked:", "", *lines] if lines else ["There is nothing to revoke."]))


def _describe(grant: Grant, saved: bool) -> str:
    calls = grant.label or f"`{grant.tool}` {title(grant.subject)}"
    place = "saved for this project" if saved else "in this session"
    return f"{'Allowed' if grant.allowed else 'Rejected'}: {calls}, {place}"


async def _clear(session: Session, argument: str) -> StopReason:
    await session.commit(Cleared(str(uuid.uuid4())))
    return await _send_text(session, "The conversation was cleared: the model sees no earlier messages.")


async def _init(session: Session, argument: str) -> StopReason:
    return await session.run_agent((Text(f"{INIT_PROMPT}\n\n{argument}".strip()),))


async def _help(session: Session, argument: str) -> StopReason:
    lines = [f"- `/{name}{f' [{command.hint}]' if command.hint else ''}`: {command.about}" for name, command in _ALL]
    return await _send_text(session, "\n".join(lines))


async def _send_text(session: Session, text: str) -> StopReason:
    await session.emit(TextDelta(str(uuid.uuid4()), text))
    return "end_turn"


_ALL = (
    ("compact", Command("Summarize the conversation to free context.", _compact, "instructions for the summary")),
    ("model", Command("Show the models, or choose one.", _model, "endpoint:model")),
    ("mode", Command("Show the modes, or choose one.", _mode, "mode")),
    ("permissions", Command("List what is always allowed, or revoke it.", _permissions, "revoke NUMBER")),
    ("status", Command("Show the model, the context and the endpoints.", _status)),
    ("clear", Command("Clear the conversation: the model sees no earlier messages.", _clear)),
    ("init", Command("Write an AGENTS.md for this project.", _init, "further instructions")),
    ("help", Command("List these commands.", _help)),
)
_COMMANDS = dict(_ALL)
# The commands in the format of the protocol.
COMMANDS: list[dict[str, Any]] = [
    {"name": name, "description": command.about} | ({"input": {"hint": command.hint}} if command.hint else {})
    for name, command in _ALL
]
