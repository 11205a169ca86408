"""Match tool results with tool calls, and give each call an id that the chat template accepts.

Many templates write tool results without ids. The model then assigns the results to the calls by their order. Other
templates look up the call of a result by the id. Both need one result per call, in the order of the calls, and ids that
no two calls share. Clients guarantee none of this:

* A result may have no id, or an id that no call has. The result then belongs to the first call without a result.
* Results may be in another order than the calls. A call may have several results, which become one result.
* Servers reuse ids such as `call_0` in each turn, or send no ids.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from helexa.neuron.parsers.call_ids import CallIdFormat, CallIds

Turn = dict[str, Any]


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message. Return an empty list if the value of `tool_calls` is malformed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or message.get("role") != "assistant":
        return []
    well_formed = all(isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls)
    return calls if well_formed else []


def with_matched_results(messages: Sequence[Turn], id_format: CallIdFormat | None) -> list[Turn]:
    """Return a conversation in which each tool result has the id and name of its call, in the order of the calls.

    Args:
        messages: the conversation.
        id_format: format of the ids that the template accepts. None if the template writes `functions.NAME:INDEX` in
            place of a call's id, as Kimi's template does.
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
    given: str
    id: str
    name: Any
    results: list[Turn] = field(default_factory=list[Turn])

    def answered(self, result: Turn) -> Turn:
        return result | {"tool_call_id": self.id} | ({} if result.get("name") else {"name": self.name})


class _Matching:
    """Matches the results of one conversation with its calls."""

    def __init__(self, id_format: CallIdFormat | None, given: Sequence[str]) -> None:
        self._ids = None if id_format is None else CallIds(id_format, given)
        self._earlier: dict[str, _Call] = {}  # the last call with each id of the client

    def turn(self, message: Turn, calls: Sequence[Mapping[str, Any]], results: Sequence[Turn]) -> list[Turn]:
        """Return an assistant message with new ids, followed by its results."""
        entries = [self._entry(call, index) for index, call in enumerate(calls)]
        late = self._distribute(entries, results)
        new_calls = [{**call, "id": entry.id} for call, entry in zip(calls, entries, strict=True)]
        if any(_has_image(result) for result in results):  # the pixels of images have the order of the client
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
        """Return a result that does not follow its call directly, or has no call in the conversation."""
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
        """Add each result to its call. Return the results that belong to no call of this turn."""
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
    """The calls of a turn without results."""

    def __init__(self, entries: Sequence[_Call]) -> None:
        self._all = deque(entries)
        self._by_name: dict[str, deque[_Call]] = {}
        for entry in entries:
            self._by_name.setdefault(str(entry.name), deque()).append(entry)

    def first(self, name: Any) -> _Call | None:
        """Return the first call of the tool `name` without a result, or else the first call without a result."""
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
