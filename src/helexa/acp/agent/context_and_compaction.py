"""Inputs of one agent turn, and the compaction of a conversation that is too long."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from helexa.acp.config import Mode, Settings
from helexa.acp.conversation_and_events import (
    AssistantMessage,
    Cleared,
    CompactionChanged,
    CompactionDelta,
    Emit,
    Image,
    Message,
    Part,
    Summary,
    Text,
    ToolResult,
    UserMessage,
)
from helexa.acp.providers.models import ModelChoice, Models, Provider
from helexa.acp.providers.requests_and_events import AnswerDelta, ModelRequest, ProviderError, ThoughtLevel
from helexa.acp.tools.excerpt import ends
from helexa.acp.tools.permission_rules import PermissionCallback, Scope
from helexa.acp.tools.tool_and_effects import ToolContext

if TYPE_CHECKING:
    from helexa.acp.tools.toolbox import Toolbox


SUMMARY_HEAD = "Summary of the conversation so far:\n\n"
NOT_RUN = "ERROR: this call was not run."

BYTES_PER_TOKEN = 3.5
MESSAGE_TOKENS = 8
IMAGE_TOKENS = 512

UNTOUCHED = 4  # number of last messages that `fit_messages` leaves unchanged

MIN_BYTES = 256
"""Minimum size in bytes of a text that `fit_messages` replaces.

A note in place of a shorter text would save too few tokens.
"""

STRIDE = 8
"""`fit_messages` replaces messages in groups of this size.

If it replaced one message per request, the beginning of the prompt would change with each request. With groups, the
beginning stays the same for several requests, so the server can reuse its prefix cache.
"""


@dataclass(slots=True)
class Choices:
    """The user's current choices: model, permission mode, thought level, temperature.

    The user may change them while the agent works, so the agent reads them before each model request.
    """

    model: ModelChoice
    mode: Mode
    thought_level: ThoughtLevel = "default"
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """The context of one agent turn: all inputs of the work on one prompt.

    A turn consists of rounds. In each round, the model returns a response and the agent runs its tool calls.
    """

    settings: Settings  # the configuration
    messages: Sequence[Message]  # the history, oldest first. When `run_turn` starts, the last message is the prompt.
    commit: Callable[..., Awaitable[None]]  # appends messages to the history, in memory and on disk
    choices: Choices
    models: Models  # the configured endpoints and their models
    toolbox: "Toolbox"  # the tools that the model may call
    context: ToolContext  # the session's folders, and access to files and commands
    # returns the user's earlier decision about all tool calls in a scope, or None if there is none
    ruling: Callable[[Scope], bool | None]
    remember: Callable[[Scope, bool], None]  # applies a decision to all calls in a scope until the session ends
    request_permission: PermissionCallback  # asks the user whether a tool call may run
    emit: Emit  # sends an event to the editor


def visible(messages: Iterable[Message]) -> list[Message]:
    """Return the messages of the agent's conversation that the model gets as context.

    Messages before the last `Cleared` entry are omitted. A summary replaces the messages that it summarizes. In the
    returned messages, each tool call has a result and each result has a call. A call without a result gets a failed
    result. Results without a call, and responses that have only reasoning, are omitted.
    """
    view: list[Message] = []
    for message in messages:
        match message:
            # The user sees the earlier messages, but the model does not.
            case Cleared():
                view = []
            case Summary(id, text, kept):
                head = UserMessage(id, (Text(f"{SUMMARY_HEAD}{text}"),), hidden=True)
                # `kept` counts the messages that the model got, without empty responses.
                view = [head, *(list(_well_formed(view))[-kept:] if kept else ())]
            case _:
                view.append(message)
    return list(_well_formed(view))


def _well_formed(messages: list[Message]) -> Iterable[Message]:
    unanswered: dict[str, None] = {}
    for message in messages:
        if isinstance(message, ToolResult):
            if message.call_id in unanswered:
                del unanswered[message.call_id]
                yield message
            continue
        # Endpoints reject a call without a result, and a result without its call.
        yield from (ToolResult(id, NOT_RUN, failed=True) for id in unanswered)
        unanswered = {}
        if isinstance(message, AssistantMessage):
            if not message.text.strip() and not message.calls:
                continue
            unanswered = dict.fromkeys(call.id for call in message.calls)
        yield message
    yield from (ToolResult(id, NOT_RUN, failed=True) for id in unanswered)


def text_tokens(text: str) -> float:
    """Return the estimated number of tokens of a text in the agent's context."""
    return len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN


def tokens(messages: Iterable[Message]) -> float:
    """Return the estimated number of tokens of messages in the agent's context."""
    return sum(_tokens(message) + MESSAGE_TOKENS for message in messages)


def _tokens(message: Message) -> float:
    match message:
        case UserMessage(_, parts):
            return sum(map(_part_tokens, parts))
        case AssistantMessage():
            call_tokens = sum(text_tokens(call.name) + text_tokens(call.arguments) for call in message.calls)
            return text_tokens(message.text) + call_tokens
        case ToolResult():
            return text_tokens(message.content) + IMAGE_TOKENS * len(message.images)
        case _:
            return 0.0


def _part_tokens(part: Part) -> float:
    return IMAGE_TOKENS if isinstance(part, Image) else text_tokens(part.text)


def fit_messages(messages: Sequence[Message], max_tokens: float) -> list[Message]:
    """Return the messages, shortened to at most `max_tokens` tokens if possible.

    Until the messages fit, first the contents of tool results and then the texts of responses are replaced by one-line
    notes, oldest first and in groups of `STRIDE`. User messages, short texts and the last `UNTOUCHED` messages stay
    unchanged, so the result may be too long.
    """
    view = list(messages)
    excess = tokens(view) - max_tokens
    replaced = 0
    for kind in (ToolResult, AssistantMessage):
        for index, message in enumerate(view[:-UNTOUCHED]):
            if excess <= 0 and replaced % STRIDE == 0:
                return view
            if isinstance(message, kind) and (shortened := _shortened(message)) is not None:
                excess -= _tokens(message) - _tokens(shortened)
                view[index] = shortened
                replaced += 1
    return view


def _shortened(message: ToolResult | AssistantMessage) -> Message | None:
    text = message.content if isinstance(message, ToolResult) else message.text
    size = len(text.encode("utf-8", "replace"))
    has_images = isinstance(message, ToolResult) and bool(message.images)
    if size < MIN_BYTES and not has_images:
        return None
    note = f"[{size} bytes{' and images' if has_images else ''} were removed to free context]"
    if isinstance(message, ToolResult):
        return msgspec.structs.replace(message, content=note, images=())
    return msgspec.structs.replace(message, text=note)


def without_images(messages: Iterable[Message]) -> list[Message]:
    """Return a copy of the messages with a text note in place of each image."""
    note = Text("[an image, which this model cannot see]")
    shown: list[Message] = []
    for message in messages:
        match message:
            case UserMessage(_, parts) if any(isinstance(part, Image) for part in parts):
                parts_without_images = tuple(note if isinstance(part, Image) else part for part in parts)
                shown.append(msgspec.structs.replace(message, parts=parts_without_images))
            case ToolResult() if message.images:
                shown.append(
                    msgspec.structs.replace(message, content=f"{message.content}\n{note.text}".strip(), images=())
                )
            case _:
                shown.append(message)
    return shown


SUMMARY_TOKENS = 4096  # maximum tokens of a summary, which is also limited to a quarter of the context
UNKNOWN_CONTEXT = 32_768  # assumed context size in tokens if the context size is unknown
UNCHANGED_SHARE = 8  # a compaction keeps the newest messages that fit in 1 / UNCHANGED_SHARE of the context
MIN_TOKENS = 200  # conversations below this number of tokens are not summarized
_MAX_RESULT_BYTES = 2000  # maximum bytes of one result, or of one call's arguments, in the text to summarize
_MAX_PROMPT_BYTES = 4000  # maximum bytes of the user's last prompt that are copied verbatim into the summary
_USED_SHARE = 0.8  # share of the context that the request for a summary may fill, because token estimates are inexact
_SYSTEM = """\
Summarize a conversation between a user and a coding agent. The agent will continue the work with only your summary.

Write in plain text:
- what the user wants, in the user's words if they matter
- what the agent found out
- files that were read, created or changed, with their paths. Example: changed src/app.py: the port is an option now
- important commands and their results
- decisions and their reasons
- what is left to do, and the next step

Leave out what no longer matters. Write only the summary."""


async def compact(turn: Turn, instructions: str = "") -> bool:
    """Let the model summarize the older messages; append the summary to the history.

    If the model fails, the conversation stays unchanged and a failed `CompactionChanged` is emitted. `instructions` are
    the user's additional instructions for the summary.

    Returns:
        True if a summary was appended. False if the model failed or the conversation is too short.
    """
    view = visible(turn.messages)
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
    await turn.commit(Summary(id, text, unchanged_count))
    await turn.emit(CompactionChanged(id, "completed", summary=text))
    return True


async def _summary(
    turn: Turn, provider: Provider, id: str, messages: Sequence[Message], context: int, instructions: str
) -> str:
    max_tokens = min(SUMMARY_TOKENS, context // 4)
    system = f"{_SYSTEM}\n\nThe user adds: {instructions}" if instructions else _SYSTEM
    max_bytes = int((context * _USED_SHARE - max_tokens) * BYTES_PER_TOKEN) - len(system.encode())
    # If the conversation exceeds the context, only its beginning and its end are summarized.
    transcript = ends("\n\n".join(_transcript(messages)), max(max_bytes, 1000))
    request = ModelRequest(
        model=turn.choices.model.model,
        system=system,
        messages=[
            UserMessage("", (Text(f"<conversation>\n{transcript}\n</conversation>\n\nSummarize this conversation."),))
        ],
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
        raise ProviderError(
            "invalid", f"{provider.endpoint.name} returned an empty summary; try /compact again or choose another model"
        )
    return text


def _unchanged_count(view: Sequence[Message], max_tokens: float) -> int:
    """Return how many of the last messages a compaction keeps unchanged.

    These messages have at most `max_tokens` tokens in total.
    """
    # The kept messages never begin with a tool result, because a result must not be separated from its call.
    unchanged_count = 0
    for count in range(1, len(view)):
        if tokens(view[-count:]) > max_tokens:
            break
        if not isinstance(view[-count], ToolResult):
            unchanged_count = count
    return unchanged_count


def _last_prompt(summed_up: Sequence[Message], unchanged_count: Sequence[Message]) -> str:
    """Return the user's last prompt as text to append to the summary, or "".

    The text is empty if the user has written no prompt, or if `unchanged_count`, the messages that the compaction
    keeps, contains a user message. In the second case, the model sees that message in any case.
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
