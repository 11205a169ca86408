"""Compaction: the chosen model summarizes a conversation that has become too long for its context."""

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from helexa.acp.agent.turn import Turn
from helexa.acp.agent.view import BYTES_PER_TOKEN, tokens, visible
from helexa.acp.events import CompactionChanged, CompactionDelta
from helexa.acp.history import AssistantMessage, Message, Summary, Text, ToolResult, UserMessage
from helexa.acp.providers.provider import AnswerDelta, ModelRequest, Provider, ProviderError
from helexa.acp.tools.excerpt import ends

SUMMARY_TOKENS = 4096
"""Maximum tokens of a summary, which is also limited to a quarter of the context."""

UNKNOWN_CONTEXT = 32_768
"""Assumed context size in tokens if the context size is unknown."""

KEPT_PART = 8
"""1 / KEPT_PART of the context is filled with the newest messages, which stay unchanged."""

LEAST_TOKENS = 200
"""Conversations below this number of tokens are not summarized."""

_MOST_RESULT = 2000  # bytes of one result in the text to summarize
_MOST_PROMPT = 4000  # bytes of the last prompt that are copied verbatim
_CAUTION = 0.8  # part of the context to use, as token estimates are inexact

_SYSTEM = """\
You sum up a conversation between a user and a coding agent, so that the agent can go on with your summary alone. Say
what the user wants, in his words where they matter; what was found out; which files were read, made or changed, with
their paths; which commands matter and how they ended; decisions and their reasons; what is left to do, and what comes
next. Leave out what no longer matters. Write plain text, nothing before and nothing after the summary."""


async def compact(turn: Turn, instructions: str = "") -> bool:
    """Summarize the conversation; return whether it was summarized.

    A failure emits `CompactionChanged`, and the conversation stays unchanged.
    """
    view = visible(turn.conversation.messages)
    if tokens(view) < LEAST_TOKENS:
        return False
    id = str(uuid.uuid4())
    await turn.emit(CompactionChanged(id, "in_progress"))
    try:
        provider = await turn.models.provider(turn.choices.model)
        context = turn.models.card(turn.choices.model).context or UNKNOWN_CONTEXT
        kept = _kept(view, context / KEPT_PART)
        text = await _summary(turn, provider, id, view[: len(view) - kept], context, instructions)
    except ProviderError as error:
        await turn.emit(CompactionChanged(id, "failed", error=error.message))
        return False
    except asyncio.CancelledError:
        await turn.emit(CompactionChanged(id, "cancelled"))
        raise
    text += _last_prompt(view[: len(view) - kept], view[len(view) - kept :])
    await turn.conversation.commit(Summary(id, text, kept))
    await turn.emit(CompactionChanged(id, "completed", summary=text))
    return True


async def _summary(
    turn: Turn, provider: Provider, id: str, messages: Sequence[Message], context: int, instructions: str
) -> str:
    most = min(SUMMARY_TOKENS, context // 4)
    system = f"{_SYSTEM}\n\nThe user adds: {instructions}" if instructions else _SYSTEM
    room = int((context * _CAUTION - most) * BYTES_PER_TOKEN) - len(system.encode())
    transcript = ends("\n\n".join(_told(messages)), max(room, 1000))
    request = ModelRequest(
        model=turn.choices.model.model,
        system=system,
        messages=[UserMessage("", (Text(f"<conversation>\n{transcript}\n</conversation>\n\nSum it up."),))],
        max_tokens=most,
        thought_level="none",
    )
    parts: list[str] = []
    async with aclosing(provider.stream(request)) as events:
        async for event in events:
            if isinstance(event, AnswerDelta):
                parts.append(event.text)
                await turn.emit(CompactionDelta(id, event.text))
    text = "".join(parts).strip()
    if not text:
        raise ProviderError("invalid", f"{provider.endpoint.name} gave an empty summary")
    return text


def _kept(view: Sequence[Message], room: float) -> int:
    """Return how many of the last messages fit in `room` tokens, without separating tool results from their call."""
    kept = 0
    for count in range(1, len(view)):
        if tokens(view[-count:]) > room:
            break
        if not isinstance(view[-count], ToolResult):
            kept = count
    return kept


def _last_prompt(summed_up: Sequence[Message], kept: Sequence[Message]) -> str:
    """Return the last prompt of the user for the summary, or an empty text if a kept message contains a prompt."""
    if any(isinstance(message, UserMessage) for message in kept):
        return ""
    for message in reversed(summed_up):
        if isinstance(message, UserMessage) and not message.hidden:
            words = "\n".join(part.text for part in message.parts if isinstance(part, Text))
            return f"\n\nThe user's last message, word by word:\n{ends(words, _MOST_PROMPT)}"
    return ""


def _told(messages: Iterable[Message]) -> Iterable[str]:
    for message in messages:
        match message:
            case UserMessage():
                words = "\n".join(part.text if isinstance(part, Text) else "[a picture]" for part in message.parts)
                yield f"User: {words}"
            case AssistantMessage():
                if message.text:
                    yield f"Agent: {message.text}"
                for call in message.calls:
                    yield f"Agent calls {call.name} with {ends(call.arguments, _MOST_RESULT)}"
            case ToolResult():
                yield f"Result: {ends(message.content, _MOST_RESULT)}"
            case _:
                pass
