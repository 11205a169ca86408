"""Compaction: the session's model summarizes a conversation that has become too long for the model's context."""

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

UNCHANGED_SHARE = 8
"""A compaction leaves the newest messages unchanged, up to 1 / UNCHANGED_SHARE of the context."""

MIN_TOKENS = 200
"""Conversations below this number of tokens are not summarized."""

_MAX_RESULT_BYTES = 2000  # bytes of one tool result in the text to summarize
_MAX_PROMPT_BYTES = 4000  # bytes of the last prompt that are copied verbatim
_USED_SHARE = 0.8  # share of the context to use, because token estimates are inexact

_SYSTEM = """\
You sum up a conversation between a user and a coding agent, so that the agent can go on with your summary alone. Say
what the user wants, in his words where they matter; what was found out; which files were read, made or changed, with
their paths; which commands matter and how they ended; decisions and their reasons; what is left to do, and what comes
next. Leave out what no longer matters. Write plain text, nothing before and nothing after the summary."""


async def compact(turn: Turn, instructions: str = "") -> bool:
    """Let the model summarize the conversation, and append the summary to the history.

    If the model fails, the conversation stays unchanged and a failed `CompactionChanged` is emitted.

    Args:
        turn: the conversation and the model.
        instructions: the user's additional instructions for the summary.

    Returns:
        True if a summary was appended. False if the model failed or the conversation is too short.
    """
    view = visible(turn.conversation.messages)
    if tokens(view) < MIN_TOKENS:
        return False
    id = str(uuid.uuid4())
    await turn.emit(CompactionChanged(id, "in_progress"))
    try:
        provider = await turn.models.provider(turn.choices.model)
        context = turn.models.card(turn.choices.model).context or UNKNOWN_CONTEXT
        unchanged_count = _unchanged_count(view, context / UNCHANGED_SHARE)
        text = await _summary(turn, provider, id, view[: len(view) - unchanged_count], context, instructions)
    except ProviderError as error:
        await turn.emit(CompactionChanged(id, "failed", error=error.message))
        return False
    except asyncio.CancelledError:
        await turn.emit(CompactionChanged(id, "cancelled"))
        raise
    text += _last_prompt(view[: len(view) - unchanged_count], view[len(view) - unchanged_count :])
    await turn.conversation.commit(Summary(id, text, unchanged_count))
    await turn.emit(CompactionChanged(id, "completed", summary=text))
    return True


async def _summary(
    turn: Turn, provider: Provider, id: str, messages: Sequence[Message], context: int, instructions: str
) -> str:
    max_tokens = min(SUMMARY_TOKENS, context // 4)
    system = f"{_SYSTEM}\n\nThe user adds: {instructions}" if instructions else _SYSTEM
    max_bytes = int((context * _USED_SHARE - max_tokens) * BYTES_PER_TOKEN) - len(system.encode())
    transcript = ends("\n\n".join(_transcript(messages)), max(max_bytes, 1000))
    request = ModelRequest(
        model=turn.choices.model.model,
        system=system,
        messages=[UserMessage("", (Text(f"<conversation>\n{transcript}\n</conversation>\n\nSum it up."),))],
        max_tokens=max_tokens,
        thought_level="none",
    )
    deltas: list[str] = []
    async with aclosing(provider.stream(request)) as events:
        async for event in events:
            if isinstance(event, AnswerDelta):
                deltas.append(event.text)
                await turn.emit(CompactionDelta(id, event.text))
    text = "".join(deltas).strip()
    if not text:
        raise ProviderError("invalid", f"{provider.endpoint.name} gave an empty summary")
    return text


def _unchanged_count(view: Sequence[Message], max_tokens: float) -> int:
    """Return how many of the last messages in `view` fit in `max_tokens`, to exclude them from the summary.

    The first of these messages is never a tool result, because a result must not be separated from its call.
    """
    unchanged_count = 0
    for count in range(1, len(view)):
        if tokens(view[-count:]) > max_tokens:
            break
        if not isinstance(view[-count], ToolResult):
            unchanged_count = count
    return unchanged_count


def _last_prompt(summed_up: Sequence[Message], unchanged_count: Sequence[Message]) -> str:
    """Return the text of the last user message that the summary replaces, to be appended to the summary.

    If a user message stays in the conversation unchanged, return an empty text.

    Args:
        summed_up: the messages that the summary replaces.
        unchanged_count: the later messages, which stay in the conversation unchanged.
    """
    if any(isinstance(message, UserMessage) for message in unchanged_count):
        return ""
    for message in reversed(summed_up):
        if isinstance(message, UserMessage) and not message.hidden:
            text = "\n".join(part.text for part in message.parts if isinstance(part, Text))
            return f"\n\nThe user's last message, word by word:\n{ends(text, _MAX_PROMPT_BYTES)}"
    return ""


def _transcript(messages: Iterable[Message]) -> Iterable[str]:
    for message in messages:
        match message:
            case UserMessage():
                text = "\n".join(part.text if isinstance(part, Text) else "[a picture]" for part in message.parts)
                yield f"User: {text}"
            case AssistantMessage():
                if message.text:
                    yield f"Agent: {message.text}"
                for call in message.calls:
                    yield f"Agent calls {call.name} with {ends(call.arguments, _MAX_RESULT_BYTES)}"
            case ToolResult():
                yield f"Result: {ends(message.content, _MAX_RESULT_BYTES)}"
            case _:
                pass
