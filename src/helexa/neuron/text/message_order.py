"""Match tool results with calls; merge and split messages that a template rejects.

Many templates write tool results without ids. The model then assigns the results to the calls by their order. Other
templates look up the call of a result by the id. Both need one result per call, in the order of the calls, and ids that
no two calls share. Clients guarantee none of this:

* A result may have no id, or an id that no call has. The result then belongs to the first call without a result.
* Results may be in another order than the calls. A call may have several results, which become one result.
* Servers reuse ids such as `call_0` in each turn, or send no ids.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from helexa.neuron.parsers.call_ids import CallIdFormat, CallIds

Turn = dict[str, Any]

# Names of the field with an assistant message's reasoning, the preferred name first.
REASONING = ("reasoning_content", "thinking", "reasoning")

_BETWEEN = "\n\n"
_TEXT_PARTS = ("text", "input_text", "output_text")


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an assistant message's calls; [] for other roles or if one is malformed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or message.get("role") != "assistant":
        return []
    well_formed = all(isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls)
    return calls if well_formed else []


def with_matched_results(messages: Sequence[Turn], id_format: CallIdFormat | None) -> list[Turn]:
    """Return messages with ids of `id_format`, and results in the order of the calls.

    The results of a call are joined, and get its id and name. If a turn's results have images, they keep their order.
    `id_format` is the format of the ids that the template accepts. None if the template writes `functions.NAME:INDEX`
    in place of a call's id, as Kimi's template does.
    """
    if not any(message.get("role") == "tool" or calls_of(message) for message in messages):
        return list(messages)
    given = [_given_id(call, "id") for message in messages for call in calls_of(message)]
    given += [_given_id(message, "tool_call_id") for message in messages if message.get("role") == "tool"]
    matching = _Matching(id_format, given)
    matched: list[Turn] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if message.get("role") == "tool":
            matched.append(matching.late_result(message))
            continue
        if not (calls := calls_of(message)):
            matched.append(message)
            continue
        results = list(takewhile(lambda turn: turn.get("role") == "tool", messages[position:]))
        position += len(results)
        matched += matching.turn(message, calls, results)
    return matched


@dataclass
class _Call:
    given: str  # the client's id of the call, or ""
    id: str  # the id that the template gets
    name: Any
    results: list[Turn] = field(default_factory=list[Turn])

    def answered(self, result: Turn) -> Turn:
        return result | {"tool_call_id": self.id} | ({} if result.get("name") else {"name": self.name})


class _Matching:
    """Matches the results of one conversation with its calls."""

    def __init__(self, id_format: CallIdFormat | None, given: Sequence[str]) -> None:
        self._ids = None if id_format is None else CallIds(id_format, given)
        self._earlier: dict[str, _Call] = {}  # by the client's id, the last call of earlier turns

    def turn(self, message: Turn, calls: Sequence[Mapping[str, Any]], results: Sequence[Turn]) -> list[Turn]:
        """Return an assistant message with new call ids, followed by the calls' results."""
        entries = [self._entry(call, index) for index, call in enumerate(calls)]
        late = self._distribute(entries, results)
        new_calls = [{**call, "id": entry.id} for call, entry in zip(calls, entries, strict=True)]
        if any(_has_image(result) for result in results):  # keep the order, because the order matches images to results
            owners = {id(result): entry for entry in entries for result in entry.results}
            answers = [
                owners[id(result)].answered(result) if id(result) in owners else self.late_result(result)
                for result in results
            ]
        else:
            answers = [entry.answered(_joined(entry.results)) for entry in entries if entry.results]
            answers += [self.late_result(result) for result in late]
        self._earlier |= {entry.given: entry for entry in entries if entry.given}
        return [message | {"tool_calls": new_calls}, *answers]

    def late_result(self, result: Turn) -> Turn:
        """Return `result`, which does not directly follow its call, with the call's id.

        A result without a call gets a new id.
        """
        given = _given_id(result, "tool_call_id")
        if given in self._earlier:
            return self._earlier[given].answered(result)
        name = result.get("name")
        call = {"id": given, "function": {"name": name if isinstance(name, str) else "unknown"}}
        entry = self._entry(call, 0)
        if given:
            self._earlier[given] = entry
        return result | {"tool_call_id": entry.id}

    def _entry(self, call: Mapping[str, Any], index: int) -> _Call:
        given, name = _given_id(call, "id"), call["function"].get("name")
        new_id = f"functions.{name}:{index}" if self._ids is None else self._ids.assign(given)
        return _Call(given, new_id, name)

    def _distribute(self, entries: Sequence[_Call], results: Sequence[Turn]) -> list[Turn]:
        """Add each result to its call; return results that belong to no call of this turn."""
        by_id: dict[str, list[_Call]] = {}
        for entry in reversed(entries):
            by_id.setdefault(entry.given, []).append(entry)
        unmatched: list[Turn] = []
        for result in results:
            given = _given_id(result, "tool_call_id")
            if not given or given not in by_id:
                unmatched.append(result)
                continue
            owners = by_id[given]  # calls with the same id get the results in order
            (owners.pop() if len(owners) > 1 else owners[0]).results.append(result)
        late: list[Turn] = []
        free = _Free(entries)
        for result in unmatched:
            is_earlier = _given_id(result, "tool_call_id") in self._earlier
            entry = None if is_earlier else free.first(result.get("name"))
            (late if entry is None else entry.results).append(result)
        return late


class _Free:
    """The tool calls of a turn to which no result is assigned yet."""

    def __init__(self, entries: Sequence[_Call]) -> None:
        self._all = deque(entries)
        self._by_name: dict[str, deque[_Call]] = {}
        for entry in entries:
            self._by_name.setdefault(str(entry.name), deque()).append(entry)

    def first(self, name: Any) -> _Call | None:
        """Return the first free call of the tool `name`, or else the first free call."""
        for queue in (self._by_name.get(str(name)), self._all):
            while queue and queue[0].results:
                queue.popleft()
            if queue:
                return queue[0]
        return None


def _given_id(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else "" if value is None else str(value)


def _has_image(message: Turn) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        not isinstance(part, Mapping) or part.get("type") != "text" for part in content
    )


def _joined(results: Sequence[Turn]) -> Turn:
    """Return the results of one call as one result."""
    if len(results) == 1:
        return results[0]
    contents = [result.get("content") for result in results]
    if all(isinstance(content, str) for content in contents):
        return results[0] | {"content": "\n".join(map(str, contents))}
    lists = [
        content if isinstance(content, list) else [{"type": "text", "text": content or ""}] for content in contents
    ]
    return results[0] | {"content": [part for content in lists for part in content]}


def text_of(content: Any) -> str | None:
    """Return the text of `content`, one part per line; None if a part is no text."""
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
    """Return messages, the system messages joined at the start, unless one is no text."""
    systems = [message for message in messages if message.get("role") in ("system", "developer")]
    texts = [text_of(message.get("content")) for message in systems]
    if not systems or (len(systems) == 1 and systems[0] is messages[0]) or any(text is None for text in texts):
        return list(messages)
    prompt = _BETWEEN.join([text for text in texts if text])
    others = [message for message in messages if message.get("role") not in ("system", "developer")]
    return [systems[0] | {"content": prompt}, *others]


def with_tools_in_system(messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]], field: str) -> list[Turn]:
    """Return `messages` with `tools` as JSON in `field` of the first system message.

    If the first message is not a system message, an empty system message is put before it.
    """
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    has_system = bool(messages) and messages[0].get("role") == "system"
    system = messages[0] if has_system else {"role": "system", "content": ""}
    return [system | {field: functions}, *messages[has_system:]]


def with_system_in_user_message(messages: Sequence[Turn]) -> list[Turn]:
    """Return `messages` with the system text at the start of the first user message.

    `messages` must begin with the system message. If it is the only message, it becomes a user message. If it is not
    text, or other messages but no user message follow, all messages stay unchanged.
    """
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
    """Return messages of one tool call each, followed by its result.

    Results are found by id, so `messages` must come from `with_matched_results`.
    """
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
    """Yield `messages`; split a message with text and calls into two, the text first."""
    for message in messages:
        if not calls_of(message) or not message.get("content"):
            yield message
            continue
        yield {key: value for key, value in message.items() if key != "tool_calls"}
        yield {key: value for key, value in message.items() if key not in ("content", *REASONING)}


def with_text_in_results(messages: Sequence[Turn]) -> list[Turn]:
    """Return `messages` with user texts after a tool result moved to this result.

    User messages with images stay as they are.
    """
    turns: list[Turn] = []
    for message in messages:
        is_text = message.get("role") == "user" and text_of(message.get("content")) is not None
        if is_text and turns and turns[-1].get("role") == "tool":
            turns[-1] = turns[-1] | {"content": _merged(turns[-1], message)["content"]}
        else:
            turns.append(message)
    return turns


def alternating(messages: Sequence[Turn], empty: Any) -> list[Turn]:
    """Return messages in an alternating order of user and assistant, for a template.

    Consecutive messages of one role become one message. A user message after a tool call or its result gets an empty
    answer before it, with the content `empty`. An answer without a user message before it gets an empty user message.
    Messages with tool calls, and tool results, are not part of the alternation.
    """
    turns: list[Turn] = []
    speaker = ""  # role of the last message that is part of the alternation
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
    """Join two messages' contents; other fields of `second` override those of `first`."""
    before, after = first.get("content"), second.get("content")
    if isinstance(before, str) and isinstance(after, str):
        return first | second | {"content": _BETWEEN.join([text for text in (before, after) if text])}
    parts = [part for content in (before, after) for part in _as_parts(content)]
    return first | second | {"content": parts}


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
