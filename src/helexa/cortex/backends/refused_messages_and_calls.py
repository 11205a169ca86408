"""Rewrites messages and tool calls that a backend has refused.

A backend may refuse lists of texts, messages without reasoning, the order of roles, and the ids, names and missing
signatures of tool calls.
"""

import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import msgspec
import orjson

from helexa.cortex.backends.chat_request import EXTRA, changed_messages, with_one_text

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

# Matches errors of DeepSeek's server, of Python's templates and encoders, and of Ollama.
_REFUSED_PARTS = re.compile(
    rb"sequence, expected a string|expected str instance, list found|can only concatenate str \(not"
    rb"|cannot unmarshal array into Go .{0,80}content",
    re.IGNORECASE,
)


def refuses_parts(error: bytes) -> bool:
    """Return whether an error response says that content must be a string."""
    return _REFUSED_PARTS.search(error) is not None


def with_plain_texts(body: bytes) -> bytes:
    """Return a chat request in which lists of text parts are joined to one string."""
    return changed_messages(body, lambda messages: [with_one_text(message) for message in messages])


_REQUIRED_REASONING = re.compile(
    rb"(?:missing|must (?:include|contain)|requires?)\b.{0,80}\breasoning_content\b"
    rb"|\breasoning_content\b.{0,80}\b(?:must be passed back|is missing|is required)",
    re.IGNORECASE | re.DOTALL,
)


def requires_reasoning(error: bytes) -> bool:
    """Return whether an error of DeepSeek or Moonshot says that reasoning is missing."""
    return _REQUIRED_REASONING.search(error) is not None


def with_reasoning(body: bytes) -> bytes:
    """Return a chat request in which every message of the assistant has reasoning."""
    # Some backends refuse messages of the assistant without reasoning or with an empty reasoning text. Many clients do
    # not send the reasoning back, and messages of other models have none.
    return changed_messages(body, lambda messages: [_with_reasoning(message) for message in messages])


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") != "assistant" or message.get("reasoning_content"):
        return message
    # The added text contains the ids of the calls, so that it differs between messages. If the text is equal in all
    # messages, DeepSeek's models repeat it and end without an answer.
    calls = message.get("tool_calls")
    ids = [str(call.get("id")) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return message | {"reasoning_content": " ".join(ids) or " "}


_REFUSED_ORDER = re.compile(
    rb"\balternat(?:e|ing)\b|unexpected role|comes? immediately after"
    rb"|(?:successive|consecutive) (?:user|assistant|messages)",
    re.IGNORECASE,
)
_BETWEEN = "\n\n"


def refuses_order(error: bytes) -> bool:
    """Return whether an error response is about the order of the roles of messages."""
    return _REFUSED_ORDER.search(error) is not None


def with_alternating_roles(body: bytes) -> bytes:
    """Return a chat request in which user and assistant alternate. No text is lost.

    * Consecutive messages of the user become one message, and so do consecutive messages of the assistant.
    * The text of a user message that follows a tool result is appended to this result.
    """
    # Chat templates of Mistral's and Google's models, and APIs of some providers, reject two messages of one role in a
    # row. Mistral's templates also reject a message of the user after a tool result.
    return changed_messages(body, _alternating)


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in messages:
        before = turns[-1] if turns else {}
        roles = before.get("role"), message.get("role")
        is_same = roles in (("user", "user"), ("assistant", "assistant"))
        if is_same or (roles == ("tool", "user") and isinstance(message.get("content"), str)):
            turns[-1] = _merged(before, message)
        else:
            turns.append(message)
    return turns


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    merged = first | {"content": _joined(first.get("content"), second.get("content"))}
    for name in ("reasoning_content", "tool_calls"):
        if second.get(name):
            merged[name] = _joined(first.get(name), second[name])
    return merged


def _joined(first: Any, second: Any) -> Any:
    """Join two texts, or two lists of content parts.

    If only one value is a list, the other value is converted to a content part.
    """
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_BETWEEN}{second}"
    return [part for content in (first, second) for part in _as_parts(content)]


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


# Matches errors of Mistral's templates (ids of 9 characters), of OpenAI's API (at most 40 characters), and of
# Anthropic's and Amazon's APIs (ids that match a pattern).
_REFUSED_IDS = re.compile(
    rb"tool[ _]calls?(?:\[\d+\]\.|[ _])ids?\b.{0,200}\b(?:length|9)\b|tool_?use[._]?id\b.{0,300}\bpattern\b",
    re.IGNORECASE | re.DOTALL,
)
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


def refuses_ids(error: bytes) -> bool:
    """Return whether an error response says that ids of tool calls are malformed."""
    return _REFUSED_IDS.search(error) is not None


def with_short_ids(body: bytes) -> bytes:
    """Return a chat request in which all ids of tool calls are 9 letters or digits.

    An id in this format stays.
    """
    # Mistral's chat templates accept only ids in this format. A new id depends only on the old id. Calls and results
    # therefore still match, and later requests of the conversation begin with the same text, which may be cached.
    return changed_messages(body, lambda messages: [_shortened(message) for message in messages])


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(id := message.get("tool_call_id"), str):
        message = message | {"tool_call_id": _short(id)}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = message | {"tool_calls": [_with_short_id(call) for call in calls]}
    return message


def _with_short_id(call: Any) -> Any:
    return call | {"id": _short(call["id"])} if isinstance(call, dict) and isinstance(call.get("id"), str) else call


# Matches errors of OpenAI's, Mistral's, Google's and Amazon's APIs. Most allow 64 characters in a name.
_REFUSED_NAMES = re.compile(
    rb"\bname\b.{0,300}\b(?:pattern|length|long|longer|match|alpha\w*|a-z|characters)\b"
    rb"|\b(?:pattern|length|match)\b.{0,200}\bname\b",
    re.IGNORECASE | re.DOTALL,
)
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_-]{0,63}")
_NOT_IN_NAMES = re.compile("[^A-Za-z0-9_-]")
# Number of characters that a new name keeps of the old name. With an underscore and 8 hash digits after them, and
# perhaps an underscore before them, the new name has at most 64 characters.
_KEPT_CHARS = 54


def refuses_names(error: bytes) -> bool:
    """Return whether an error response may say that a name of a function is malformed."""
    return _REFUSED_NAMES.search(error) is not None


def with_short_names(body: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a request whose functions have names that all APIs accept.

    The request is one of chat completions or of the Responses API.

    Returns:
        The request, and the original names by the names that replace them. A name that all APIs accept stays.
    """
    # Names can be long, because agents join the names of a server and of its tool. A new name depends only on the old
    # name, so later requests of the conversation begin with the same text, which may be cached.
    originals: dict[str, str] = {}

    def short(name: str) -> str:
        if _NAME.fullmatch(name):
            return name
        start = _NOT_IN_NAMES.sub("_", name[:_KEPT_CHARS])
        replacement = f"{'' if start[:1].isalpha() else '_'}{start}_{_hash(name)[:8]}"
        originals[replacement] = name
        return replacement

    fields = _fields.decode(body)
    changed = {
        name: msgspec.Raw(orjson.dumps(_renamed(orjson.loads(memoryview(fields[name])), short)))
        for name in ("tools", "tool_choice", "messages", "input")
        if name in fields
    }
    return (msgspec.json.encode(fields | changed), originals) if originals else (body, originals)


_MOST_LEVELS = 5  # messages, message, tool_calls, call, function


def _renamed(value: Any, short: Callable[[str], str], levels: int = _MOST_LEVELS) -> Any:
    """Return `value` with function names changed by `short`, at most `levels` deep."""
    if isinstance(value, list) and levels:
        return [_renamed(element, short, levels - 1) for element in value]
    if not isinstance(value, dict) or not levels:
        return value
    renamed = dict(value)
    # Results of tools may name their function. The name in a message of another role is the name of a person.
    if isinstance(name := value.get("name"), str) and value.get("role", "tool") == "tool":
        renamed["name"] = short(name)
    for field in ("function", "tool_calls", "allowed_tools", "tools"):
        if field in value:
            renamed[field] = _renamed(value[field], short, levels - 1)
    return renamed


def with_original_names(body: bytes, originals: Mapping[str, str]) -> bytes:
    """Replace the strings in JSON text that are short names by the original names.

    `originals` has the original names by short names. A short name contains a hash of the original name, so no other
    string in the body is likely to equal it.
    """
    if not originals:
        return body
    short = re.compile(b'"(%b)"' % b"|".join(name.encode() for name in originals))
    return short.sub(lambda match: orjson.dumps(originals[match[1].decode()]), body)


# Google's API accepts this text in place of a signature that the client did not return.
_ANY_SIGNATURE = {"google": {"thought_signature": "skip_thought_signature_validator"}}


def lacks_signatures(error: bytes) -> bool:
    """Return whether an error of Google says that a tool call has no signature."""
    return re.search(rb"missing\b.{0,20}\bthought_signature", error) is not None


def with_any_signatures(body: bytes) -> bytes:
    """Return a chat request; in messages without signatures, the first call gets one."""
    return changed_messages(body, lambda messages: [_with_signature(message) for message in messages])


def _with_signature(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
        return message
    if any(call.get(EXTRA) for call in calls):
        return message  # Google signs only the first of parallel calls
    return message | {"tool_calls": [calls[0] | {EXTRA: _ANY_SIGNATURE}, *calls[1:]]}


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "replace")).hexdigest()


def _short(id: str) -> str:
    return id if _SHORT_ID.fullmatch(id) else _hash(id)[:9]
