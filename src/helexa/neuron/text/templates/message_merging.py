"""Merge, split and add messages for chat templates that accept only some orders of messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from helexa.neuron.text.templates.call_matching import calls_of

Turn = dict[str, Any]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with an assistant message's reasoning, the preferred name first."""

_BETWEEN = "\n\n"
_TEXT_PARTS = ("text", "input_text", "output_text")


def text_of(content: Any) -> str | None:
    """Return the text of content that is a string, null or a list of text parts. Return None for other content."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            return None
    return "\n".join(texts)


def with_one_system_message(messages: Sequence[Turn]) -> list[Turn]:
    """Return the conversation with the texts of all system messages in one system message at the beginning."""
    systems = [message for message in messages if message.get("role") in ("system", "developer")]
    texts = [text_of(message.get("content")) for message in systems]
    if not systems or (len(systems) == 1 and systems[0] is messages[0]) or any(text is None for text in texts):
        return list(messages)
    prompt = _BETWEEN.join([text for text in texts if text])
    others = [message for message in messages if message.get("role") not in ("system", "developer")]
    return [systems[0] | {"content": prompt}, *others]


def with_system_in_user_message(messages: Sequence[Turn]) -> list[Turn]:
    """Return the conversation with the text of the system message at the beginning of the first user message."""
    first, *others = messages
    text = text_of(first.get("content"))
    index = next((index for index, message in enumerate(others) if message.get("role") == "user"), None)
    if text is None or (index is None and others):
        return list(messages)
    if index is None:
        return [{"role": "user", "content": text}]
    others[index] = _merged({"role": "user", "content": text}, others[index]) if text else others[index]
    return others


def with_single_calls(messages: Sequence[Turn]) -> list[Turn]:
    """Return the conversation with one tool call per message, each followed by its result."""
    single: list[Turn] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = calls_of(message)
        if len(calls) < 2:
            single.append(message)
            continue
        results: dict[Any, list[Turn]] = {call.get("id"): [] for call in calls}
        late: list[Turn] = []
        while position < len(messages) and messages[position].get("role") == "tool":
            results.get(messages[position].get("tool_call_id"), late).append(messages[position])
            position += 1
        rest = {key: value for key, value in message.items() if key not in ("content", "tool_calls", *REASONING)}
        for index, call in enumerate(calls):
            single.append((rest if index else message) | {"tool_calls": [call]})
            single += results[call.get("id")]
        single += late
    return single


def with_calls_apart(messages: Sequence[Turn]) -> Iterator[Turn]:
    """Yield the conversation with two messages in place of each message with text and tool calls."""
    for message in messages:
        if not calls_of(message) or not message.get("content"):
            yield message
            continue
        yield {key: value for key, value in message.items() if key != "tool_calls"}
        yield {key: value for key, value in message.items() if key not in ("content", *REASONING)}


def alternating(messages: Sequence[Turn], empty: Any) -> list[Turn]:
    """Return the conversation with alternating messages of the user and the assistant.

    Consecutive messages of the user become one message, and so do consecutive answers. If a user message follows a tool
    call or its result, an empty answer is added before the user message. If an answer has no user message before it, an
    empty user message is added. Messages with tool calls and tool results do not count.

    Args:
        messages: the conversation.
        empty: content of an empty answer. The template may reject other empty content.
    """
    turns: list[Turn] = []
    speaker = ""  # role of the last message that counts
    for message in messages:
        role = message.get("role")
        if role not in ("user", "assistant") or calls_of(message):
            turns.append(message)
            continue
        follows_directly = bool(turns) and turns[-1].get("role") == role and not calls_of(turns[-1])
        if role == speaker and follows_directly:
            turns[-1] = _merged(turns[-1], message)
            continue
        if role == "user" and speaker == "user":
            turns.append({"role": "assistant", "content": empty})
        elif role == "assistant" and speaker in ("", "assistant"):
            turns.append({"role": "user", "content": ""})
        is_empty = role == "assistant" and message.get("content") == ""
        turns.append(message | {"content": empty} if is_empty else message)
        speaker = role
    return turns


def _merged(first: Turn, second: Turn) -> Turn:
    """Return one message with the content of two messages of the same role. The reasoning is that of the second."""
    before, after = first.get("content"), second.get("content")
    if isinstance(before, str) and isinstance(after, str):
        return first | second | {"content": _BETWEEN.join([text for text in (before, after) if text])}
    parts = [part for content in (before, after) for part in _as_parts(content)]
    return first | second | {"content": parts}


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
