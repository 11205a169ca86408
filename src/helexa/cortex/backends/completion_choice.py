"""One choice of a backend's completion: its deltas, tool calls and finish reason."""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helexa.cortex.upstream.response_body import as_json, malformed, parse_arguments

MAX_CALLS = 512
MAX_ARGUMENT_CHARS = 4 << 20
# Maximum number of checks whether the arguments of a call are complete. After these checks, the arguments count as
# incomplete, so a repeated name begins no new call.
MAX_CHECKS = 1000

_ID_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 9  # Mistral's chat templates accept only ids of 9 letters and digits. All other servers accept them, too.

FAILED = "error"  # meaning of a finish reason with which a backend says that it did not complete the answer

_NO_REASON = ("", "null", "none")
_MEANINGS = {
    reason: meaning
    for meaning, reasons in {
        "stop": ("stop", "eos", "eos_token", "eos_found", "end_turn", "stop_sequence", "complete", "completed"),
        "length": ("length", "max_tokens", "max_length", "max_output_tokens", "model_length", "model_context_window"),
        "tool_calls": ("tool_calls", "tool_call", "tool_use", "function_call"),
        "content_filter": (
            *("content_filter", "content_filtered", "refusal", "safety", "sensitive", "recitation", "blocklist"),
            *("prohibited_content", "spii", "guardrail_intervened"),
        ),
        FAILED: (
            *("error", "abort", "aborted", "cancel", "cancelled", "canceled", "network_error", "timeout", "other"),
            *("insufficient_system_resource", "malformed_function_call", "unexpected_tool_call"),
        ),
    }.items()
    for reason in reasons
}
_UNFINISHED = "repetition"  # vLLM's finish reason of an answer that it ended because the text repeats itself


@dataclass(eq=False)
class _Call:
    """A tool call that the backend has begun."""

    index: int  # index of the call in the answer to the client
    backend_id: str  # id that the backend gave the call, or an empty string
    name: str = ""  # name of the function, or an empty string as long as the backend has not sent it
    # True if the backend sent the name again after complete arguments. Arguments that follow begin a new call.
    repeated: bool = False
    _arguments: list[str] = field(default_factory=list[str])
    _chars: int = 0
    _checks: int = 0

    def add(self, arguments: str) -> None:
        """Append `arguments`, of which at most `MAX_ARGUMENT_CHARS` are kept for checks."""
        self._chars += len(arguments)
        if arguments and self._chars <= MAX_ARGUMENT_CHARS:
            self._arguments.append(arguments)

    def is_complete(self) -> bool:
        """Return whether the arguments are a JSON object; False after `MAX_CHECKS` checks."""
        if not 0 < self._chars <= MAX_ARGUMENT_CHARS or not self._arguments[-1].rstrip().endswith("}"):
            return False
        self._checks += 1
        if self._checks > MAX_CHECKS:
            return False
        text = "".join(self._arguments)
        self._arguments = [text]
        return parse_arguments(text) is not None


# Google's models sign their tool calls. If the client's API has no field for the signature, the gateway appends this
# mark and the signature to the id of the call. The mark must not occur in ids without a signature. Some of these ids
# contain the name of the function, so the mark must also be unlikely in names.
_SIGNATURE_MARK = "_thought_signature_"
_SIGNATURE = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_MAX_SIGNATURE_CHARS = 8192
_TO_ID, _FROM_ID = str.maketrans("+/", "-_", "="), str.maketrans("-_", "+/")


def _signed(id: str, extra_content: Any) -> str:
    """Return the id of a call, with the signature of a Google model appended if any."""
    google = extra_content.get("google") if isinstance(extra_content, dict) else None
    signature = google.get("thought_signature") if isinstance(google, dict) else None
    if not isinstance(signature, str) or not 0 < len(signature) <= _MAX_SIGNATURE_CHARS:
        return id
    return f"{id}{_SIGNATURE_MARK}{signature.translate(_TO_ID)}" if _SIGNATURE.fullmatch(signature) else id


def split_signature(id: str) -> tuple[str, str | None]:
    """Return the id of a backend's call without its signature, and the signature.

    The signature is None if the id contains none.
    """
    own_id, _, signature = id.rpartition(_SIGNATURE_MARK)
    signature = signature.translate(_FROM_ID)
    signature += "=" * (-len(signature) % 4)
    return (own_id, signature) if own_id and _SIGNATURE.fullmatch(signature) else (id, None)


@dataclass(frozen=True)
class Changes:
    """Settings for the conversion of an answer's tool calls."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])  # original names of functions by their short names
    # True if the client's API has no field for the signature of a call. The id of the call then carries the signature.
    # Google's models refuse a conversation whose calls lack their signatures.
    signed_ids: bool = False


UNCHANGED = Changes()


class ToolCalls:
    """Converts tool calls of a backend's choice: sets new indexes and unique ids.

    Some backends give all calls the same index, or no index. Some omit the ids, or repeat id and name in each delta.
    The index, or else the id, or else the order tells which call a delta would continue. The delta begins a new call
    instead in one of these cases:

    * The delta has another id than the call, and no call has this id.
    * The delta has no id, and another name than the call.
    * The delta has no id, and repeats the name of the call after complete arguments.
    """

    def __init__(self, is_taken: Callable[[str], bool], changes: Changes = UNCHANGED) -> None:
        # Function that returns whether the conversation before the answer contains a call with this id. Such a call
        # gets a new id, because ids must be unique in a conversation.
        self._is_taken = is_taken
        self._changes = changes
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}
        self._ids = set[str]()

    def __len__(self) -> int:
        """Return the number of calls so far."""
        return len(self._calls)

    def read(self, deltas: Any, *, whole: bool = False) -> list[dict[str, Any]]:
        """Convert the field `tool_calls` of a delta, without its empty elements.

        `whole` is True for the field of a whole message, in which each element is a call.
        """
        values = [deltas] if isinstance(deltas, dict) else deltas if isinstance(deltas, list) else []
        return [converted for value in values if (converted := self._read(value, whole=whole))]

    def _read(self, value: Any, *, whole: bool) -> dict[str, Any] | None:
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(function, dict | None):
            return None
        function = function or {}
        name, arguments = function.get("name"), _as_text(function.get("arguments"), whole=whole)
        name, id = (name if isinstance(name, str) else ""), _id(value.get("id"))
        index = value.get("index")
        call = None if whole else self._continued(index if type(index) is int else None, id, name, arguments)
        if call is None:
            if not (id or name or arguments):
                return None
            call = self._begin(index, id)
            id = self._unique(id)
            if self._changes.signed_ids and "extra_content" in value:
                id = _signed(id, value["extra_content"])
            head: dict[str, Any] = {"index": call.index, "id": id, "type": "function"}
        elif call.repeated and not arguments:
            return None
        else:
            head = {"index": call.index}
        shown = {key: field for key, field in function.items() if key not in ("name", "arguments")}
        if name and not call.name:
            call.name, shown["name"] = name, self._changes.names.get(name, name)
        if arguments or "arguments" in function or "id" in head:
            shown["arguments"] = arguments
        call.add(arguments)
        others = {key: field for key, field in value.items() if key not in ("index", "id", "type", "function")}
        return {**head, "function": shown, **others} if len(head) > 1 or shown or others else None

    def _continued(self, index: int | None, id: str, name: str, arguments: str) -> _Call | None:
        """Return the call that a delta continues, or None if the delta begins a new call."""
        if index is not None:
            call = self._by_index.get(index)
        elif id:
            call = self._by_id.get(id)
        else:
            call = self._calls[-1] if self._calls else None
        if call is None:
            return None
        if id and call.backend_id and id != call.backend_id:
            return self._by_id.get(id)
        if id or not call.name:
            return call
        if name and name != call.name:
            return None
        if call.repeated and arguments:
            return None
        if name and call.is_complete():
            if arguments:
                return None
            call.repeated = True
        return call

    def _begin(self, index: Any, id: str) -> _Call:
        if len(self._calls) >= MAX_CALLS:
            raise malformed(f"the response has more than {MAX_CALLS} tool calls")
        call = _Call(len(self._calls), id)
        self._calls.append(call)
        if type(index) is int:
            self._by_index[index] = call
        if id:
            self._by_id[id] = call
        return call

    def _unique(self, id: str) -> str:
        if not id or id in self._ids or self._is_taken(id):
            id = new_id()
        self._ids.add(id)
        return id


def new_id() -> str:
    """Return a new random id of a tool call that every chat template accepts."""
    return "".join([secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS)])


def _id(value: Any) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _as_text(arguments: Any, *, whole: bool) -> str:
    """Return the arguments of a call as JSON text.

    `whole` is True if the arguments are complete.
    """
    if isinstance(arguments, str):
        # The backend encoded the arguments twice.
        decoded = parse_arguments(arguments) if whole and arguments.startswith('"') else None
        return arguments if decoded is None else as_json(decoded).decode()
    # Some backends send an object instead of JSON text.
    return as_json(arguments).decode() if isinstance(arguments, dict) else ""


def finish_reason(value: Any) -> str | None:
    """Return the finish reason of a backend's choice in OpenAI's names.

    Return None if `value` is not a finish reason, as in chunks before the end of a stream. The result is `FAILED` if
    the backend did not complete the answer. An unknown reason is returned unchanged.
    """
    # SGLang may send an object, whose `type` is the finish reason.
    if isinstance(value, dict):
        value = value.get("type")
    if not isinstance(value, str):
        return None
    name = value.strip().lower()
    # Some backends send an empty string or "null" in all chunks before the end.
    if name in _NO_REASON:
        return None
    return "length" if name == _UNFINISHED else _MEANINGS.get(name, value)


_REASONING = ("reasoning_content", "reasoning")
_OTHER_REASONING = ("thinking", "reasoning_text")


class Choice:
    """Converts the deltas of a choice, or its message, to OpenAI's format.

    Args:
        is_taken: function that returns whether an id of a tool call occurs in the conversation before the answer.
        legacy: True if the client uses the deprecated fields `functions` and `function_call`, which are then kept.
        changes: what the gateway changed in the tool calls of the request.
    """

    def __init__(self, is_taken: Callable[[str], bool], *, legacy: bool = False, changes: Changes = UNCHANGED) -> None:
        # Finish reason in OpenAI's names, or None as long as the choice has not ended. The first reason after the
        # output is kept, because some backends send another reason, "stop", at the end of each answer.
        self.reason: str | None = None
        self.shown_reason: Any = None  # the finish reason as the backend sent it
        self._calls = ToolCalls(is_taken, changes)
        self._legacy = legacy
        self._has_role = False
        self._has_deltas = False
        self._text_chars = 0
        self._reasoning_chars = 0

    def delta(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the delta of a streamed choice in OpenAI's format."""
        delta, message, text = choice.get("delta"), choice.get("message"), choice.get("text")
        if isinstance(delta, dict) and (delta or not isinstance(message, dict)):
            self._has_deltas = self._has_deltas or bool(delta)
            return self.convert(delta)
        # Some backends send `message` in place of `delta`. MiniMax sends the whole message after its deltas. In this
        # case, only the part that was not in the deltas is returned.
        if isinstance(message, dict):
            return self._rest_of(message) if self._has_deltas else self.convert(message)
        return self.convert({"content": text} if isinstance(text, str) else {})

    def convert(self, fields: dict[str, Any], *, whole: bool = False) -> dict[str, Any]:
        """Return a delta or message with content as a string and converted tool calls.

        Args:
            whole: True for a whole message, in which each element of `tool_calls` is a call.
        """
        converted = dict(fields)
        content, reasoning = _texts(fields)
        if content != fields.get("content"):
            converted["content"] = content
        for name in (*_REASONING, "refusal"):
            if not isinstance(fields.get(name), str | None):
                del converted[name]
        if reasoning and not any(converted.get(name) for name in _REASONING):
            converted["reasoning_content"] = reasoning
            for name in _OTHER_REASONING:
                converted.pop(name, None)
        if "role" in fields and (self._has_role or not isinstance(fields["role"], str) or not fields["role"]):
            del converted["role"]
        self._has_role = self._has_role or "role" in converted
        self._convert_calls(converted, whole=whole)
        self._text_chars += len(content or "")
        self._reasoning_chars += len(reasoning)
        return converted

    def end(self, reason: Any, *, replace: bool = False) -> None:
        """Store the first finish reason of the chunks or of the whole answer.

        If `replace` is true, `reason` replaces an earlier reason. The caller sets `replace` if output has followed the
        earlier reason, because the choice had not ended there.
        """
        meaning = finish_reason(reason)
        if meaning is not None and (self.reason is None or replace):
            self.reason, self.shown_reason = meaning, reason

    def last_reason(self) -> str | None:
        """Return the finish reason for the client; None if the choice has not ended."""
        if self._legacy and self.shown_reason == "function_call":
            return "function_call"
        # Some backends send "stop" for an answer that contains tool calls.
        return "tool_calls" if self.reason == "stop" and len(self._calls) else self.reason

    def has_calls(self) -> bool:
        """Return whether the choice contains a tool call."""
        return len(self._calls) > 0

    def _convert_calls(self, converted: dict[str, Any], *, whole: bool) -> None:
        function_call = None if self._legacy else converted.pop("function_call", None)
        if converted.get("tool_calls"):
            converted["tool_calls"] = self._calls.read(converted["tool_calls"], whole=whole)
        elif isinstance(function_call, dict):  # the deprecated form of a single tool call
            converted["tool_calls"] = self._calls.read([{"index": 0, "function": function_call}])
        if converted.get("tool_calls") == []:
            del converted["tool_calls"]

    def _rest_of(self, message: dict[str, Any]) -> dict[str, Any]:
        content, reasoning = _texts(message)
        rest: dict[str, Any] = {
            "content": (content or "")[self._text_chars :],
            "reasoning_content": reasoning[self._reasoning_chars :],
        }
        if not len(self._calls):
            rest |= {name: message[name] for name in ("tool_calls", "function_call") if name in message}
        return self.convert({name: value for name, value in rest.items() if value})


def _texts(fields: dict[str, Any]) -> tuple[str | None, str]:
    """Return content and reasoning of a delta or message. The content may be None."""
    names = (*_REASONING, *_OTHER_REASONING)
    reasoning = next((value for name in names if isinstance(value := fields.get(name), str) and value), "")
    content = fields.get("content")
    if not isinstance(content, list):
        return (content if isinstance(content, str) else None), reasoning
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        _read_part(part, texts, thoughts)
    return "".join(texts), reasoning or "".join(thoughts)


def _read_part(part: Any, texts: list[str], thoughts: list[str]) -> None:
    match part:
        case str():
            texts.append(part)
        case {"type": "thinking", "thinking": list(inner)}:  # Mistral's format
            for inner_part in inner:
                _read_part(inner_part, thoughts, thoughts)
        case {"type": "thinking", "thinking": str(text)} | {"type": "reasoning", "text": str(text)}:
            thoughts.append(text)
        case {"text": str(text)} | {"refusal": str(text)}:
            texts.append(text)
        case _:
            pass
