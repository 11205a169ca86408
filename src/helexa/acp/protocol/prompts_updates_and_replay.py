"""Converts prompts of the editor to messages, and events to session updates."""

import binascii
from collections.abc import Iterable, Iterator
from typing import Any, assert_never
from urllib.parse import unquote, urlsplit

import msgspec

from helexa.acp.conversation_and_events import (
    AssistantMessage,
    CallChanged,
    CallStarted,
    Card,
    CardContent,
    Cleared,
    CompactionChanged,
    CompactionDelta,
    Diff,
    Event,
    Image,
    Message,
    Notice,
    Part,
    PlanChanged,
    Summary,
    Terminal,
    Text,
    TextDelta,
    ThoughtDelta,
    TitleChanged,
    ToolCall,
    ToolResult,
    UsageChanged,
    UserMessage,
)
from helexa.acp.protocol.capabilities import ClientCapabilities
from helexa.acp.protocol.json_rpc import invalid_params

IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def read_prompt(blocks: list[Any]) -> tuple[Part, ...]:
    """Return the message parts (text and images) for the content blocks of a prompt.

    Args:
        blocks: the content blocks, as objects of the SDK's classes.

    Raises:
        RpcError: the prompt is empty or contains unsupported content.
    """
    parts: list[Part] = []
    for block in blocks:
        match block.type:
            case "text":
                parts.append(Text(block.text))
            case "image":
                parts.append(_image(block.mime_type, block.data, block.uri))
            case "resource_link":
                parts.append(Text(f"[{block.name}]({_path_or_uri(block.uri)})"))
            case "resource":
                parts.append(_resource(block.resource))
            case kind:
                raise invalid_params(f"{kind} content is not supported in prompts; send text, images or resources")
    if not any(not isinstance(part, Text) or part.text.strip() for part in parts):
        raise invalid_params("the prompt is empty; write some text")
    return tuple(parts)


def _resource(resource: Any) -> Part:
    text = getattr(resource, "text", None)
    if text is not None:
        return Text(f'<resource path="{_path_or_uri(resource.uri)}">\n{text}\n</resource>')
    mime_type = resource.mime_type or ""
    if mime_type in IMAGE_TYPES:
        return _image(mime_type, resource.blob, resource.uri)
    return Text(f"[{_path_or_uri(resource.uri)} is attached, but is not text]")


def _image(mime_type: str, data: str, uri: str | None) -> Image:
    if mime_type not in IMAGE_TYPES:
        raise invalid_params(
            f"images of type {mime_type[:100]!r} are not supported; send one of {', '.join(IMAGE_TYPES)}"
        )
    try:
        # Check the data here: an error of the endpoint would come later, and might not name the cause.
        binascii.a2b_base64(data, strict_mode=True)
    except ValueError:
        raise invalid_params("the data of an image is not valid base64; encode the image file in base64") from None
    return Image(mime_type, data, uri)


def _path_or_uri(uri: str) -> str:
    """Return the path in a `file:` URI, because tools accept paths; else the URI."""
    if not uri.startswith("file://"):
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri
    return unquote(parts.path) + (f"#{parts.fragment}" if parts.fragment else "")


Update = dict[str, Any]
MAX_RAW_OUTPUT = 10_000


def event_updates(event: Event, client: ClientCapabilities) -> list[Update]:
    """Return the `session/update` messages for an event of the agent.

    If the editor does not support an optional kind of event, the event becomes reasoning text or is dropped.
    """
    match event:
        case TextDelta(message_id, text):
            return [_chunk("agent_message_chunk", message_id, text)]
        case ThoughtDelta(message_id, text):
            return [_chunk("agent_thought_chunk", message_id, text)]
        case CallStarted(call_id, name, card, arguments, status):
            raw = {} if arguments is None else {"rawInput": arguments}
            call: Update = {"sessionUpdate": "tool_call", "toolCallId": call_id, "name": name, "status": status}
            return [call | _card(card) | raw]
        case CallChanged(call_id, status, card, arguments, output):
            call: Update = {"sessionUpdate": "tool_call_update", "toolCallId": call_id}
            if status is not None:
                call["status"] = status
            if card is not None:
                call |= _card(card)
            if arguments is not None:
                call["rawInput"] = arguments
            if output is not None:
                call["rawOutput"] = {"text": output[:MAX_RAW_OUTPUT]}
            return [call]
        case PlanChanged(entries):
            return [{"sessionUpdate": "plan", "entries": [msgspec.structs.asdict(entry) for entry in entries]}]
        case UsageChanged(used, size, cost):
            if size is None:
                return []  # a `usage_update` must have a size
            usage: Update = {"sessionUpdate": "usage_update", "used": used, "size": size}
            return [usage if cost is None else usage | {"cost": {"amount": round(cost, 6), "currency": "USD"}}]
        case TitleChanged(title):
            return [{"sessionUpdate": "session_info_update", "title": title}]
        case Notice(text, severity):
            if client.notices:
                return [{"sessionUpdate": "notice", "severity": severity, "title": text}]
            return [_as_thought(text)]
        case CompactionChanged():
            return _compaction(event, client)
        case CompactionDelta(compaction_id, text):
            chunk = {"sessionUpdate": "compaction_summary_chunk", "compactionId": compaction_id, "content": _text(text)}
            return [chunk] if client.compactions else []
        case _:
            assert_never(event)


def replay(messages: Iterable[Message], client: ClientCapabilities) -> Iterator[Update]:
    """Yield the `session/update` messages that show a saved conversation."""
    started: dict[str, ToolCall] = {}
    for message in messages:
        match message:
            case UserMessage(id, parts, hidden):
                if not hidden:
                    yield from _user_chunks(id, parts)
            case AssistantMessage():
                if message.reasoning:
                    yield from event_updates(ThoughtDelta(message.id, message.reasoning), client)
                if message.text:
                    yield from event_updates(TextDelta(message.id, message.text), client)
                started |= {call.id: call for call in message.calls}
            case ToolResult():
                call = started.pop(message.call_id, None)
                for event in _replayed_call(message, call):
                    yield from event_updates(event, client)
            case Summary(id, text):
                yield from event_updates(CompactionChanged(id, "completed", summary=text), client)
            case Cleared():
                yield from event_updates(
                    Notice("The conversation was cleared: the model sees no earlier messages."), client
                )
            case _:
                assert_never(message)
    # If the agent was killed during calls, these calls have no result. Yield a failed result for each of them, because
    # editors would otherwise show the calls as running forever.
    for call in started.values():
        for event in _replayed_call(ToolResult(call.id, "The call did not finish.", failed=True), call):
            yield from event_updates(event, client)


def _user_chunks(message_id: str, parts: Iterable[Part]) -> Iterator[Update]:
    """Yield the `session/update` messages that show a user message."""
    for part in parts:
        yield {"sessionUpdate": "user_message_chunk", "messageId": message_id, "content": _content_block(part)}


def _replayed_call(result: ToolResult, call: ToolCall | None) -> Iterator[Event]:
    name = call.name if call else "tool"
    card = result.card or Card(name, content=(Text(result.content),))
    # A saved display may contain a terminal, which the editor has closed in the meantime. Leave the terminal out.
    static_content = tuple(content for content in card.content if not isinstance(content, Terminal))
    card = msgspec.structs.replace(card, content=static_content or (Text(result.content),))
    yield CallStarted(result.call_id, name, card, _arguments(call))
    yield CallChanged(result.call_id, "failed" if result.failed else "completed", output=result.content)
    if result.plan is not None:
        yield PlanChanged(result.plan)


def _arguments(call: ToolCall | None) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any]) if call else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _compaction(event: CompactionChanged, client: ClientCapabilities) -> list[Update]:
    if client.compactions:
        update: Update = {
            "sessionUpdate": "compaction_update",
            "compactionId": event.compaction_id,
            "status": event.status,
        }
        if event.summary is not None:
            update["summary"] = [_text(event.summary)]
        if event.error is not None:
            update["error"] = event.error
        return [update]
    match event.status:
        case "completed":
            return [_as_thought("The conversation was summarized to free context.")]
        case "failed":
            return [_as_thought(f"The conversation could not be summarized: {event.error or 'unknown error'}")]
        case "in_progress" | "cancelled":
            return []


def _card(card: Card) -> Update:
    return {
        "title": card.title,
        "kind": card.kind,
        "locations": [_without_none(msgspec.structs.asdict(location)) for location in card.locations],
        "content": [_content(content) for content in card.content],
    }


def _content(content: CardContent) -> dict[str, Any]:
    match content:
        case Diff(path, old, new):
            return _without_none({"type": "diff", "path": path, "oldText": old, "newText": new})
        case Terminal(terminal_id):
            return {"type": "terminal", "terminalId": terminal_id}
        case Text() | Image():
            return {"type": "content", "content": _content_block(content)}


def _content_block(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return _text(text)
        case Image(mime_type, data, uri):
            return _without_none({"type": "image", "mimeType": mime_type, "data": data, "uri": uri})


def _chunk(kind: str, message_id: str, text: str) -> Update:
    return {"sessionUpdate": kind, "messageId": message_id, "content": _text(text)}


def _as_thought(text: str) -> Update:
    return {"sessionUpdate": "agent_thought_chunk", "content": _text(f"{text}\n")}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _without_none(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}
