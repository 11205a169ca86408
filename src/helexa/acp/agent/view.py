"""Selects the messages of a conversation that the model sees, and estimates their tokens. No side effects."""

from collections.abc import Iterable, Sequence

import msgspec

from helexa.acp.history import (
    AssistantMessage,
    Cleared,
    Image,
    Message,
    Part,
    Summary,
    Text,
    ToolResult,
    UserMessage,
)

SUMMARY_HEAD = "The conversation so far, summed up:\n\n"
NOT_RUN = "ERROR: this call was not run."

BYTES_PER_TOKEN = 3.5
MESSAGE_TOKENS = 8
IMAGE_TOKENS = 512

UNTOUCHED = 4
"""Number of last messages that `fit_messages` leaves unchanged."""

MIN_BYTES = 256
"""Minimum size in bytes of a text that `fit_messages` replaces. Replacing a shorter text saves too little."""

STRIDE = 8
"""`fit_messages` replaces messages in multiples of this number. The beginning of the prompt then stays the same for
several requests and remains in the prefix cache.
"""


def visible(messages: Iterable[Message]) -> list[Message]:
    """Return the messages of a conversation that are sent to the model.

    Messages before the last `Cleared` entry are omitted. A summary replaces the messages that it summarizes. In the
    returned messages, each tool call has a result and each result has a call.
    """
    view: list[Message] = []
    for message in messages:
        match message:
            case Cleared():
                view = []
            case Summary(id, text, kept):
                head = UserMessage(id, (Text(f"{SUMMARY_HEAD}{text}"),), hidden=True)
                view = [head, *(view[-kept:] if kept else ())]
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
        yield from (ToolResult(id, NOT_RUN, failed=True) for id in unanswered)
        unanswered = {}
        if isinstance(message, AssistantMessage):
            if not message.text.strip() and not message.calls:
                continue
            unanswered = dict.fromkeys(call.id for call in message.calls)
        yield message
    yield from (ToolResult(id, NOT_RUN, failed=True) for id in unanswered)


def text_tokens(text: str) -> float:
    """Return the estimated number of tokens of a text."""
    return len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN


def tokens(messages: Iterable[Message]) -> float:
    """Return the estimated number of tokens of all messages together."""
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
    """Return the messages, shortened to fit into `max_tokens` if possible.

    First the old tool results and then the old responses of the model are replaced by one-line notes. User messages
    and the last few messages stay unchanged. So the returned messages may still exceed `max_tokens`.
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
    note = f"[{size} bytes{' and images' if has_images else ''} were taken out to make room]"
    if isinstance(message, ToolResult):
        return msgspec.structs.replace(message, content=note, images=())
    return msgspec.structs.replace(message, text=note)


def without_images(messages: Iterable[Message]) -> list[Message]:
    """Return a copy of the messages in which a text note replaces each image, for models without image input."""
    note = Text("[a picture, which this model cannot see]")
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
