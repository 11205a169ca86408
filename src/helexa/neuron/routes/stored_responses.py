"""Stored responses of the Responses API, kept in memory."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from helexa.core.errors import ApiError, invalid_body, unsupported_parameter
from helexa.core.wire.responses_input import Item
from helexa.core.wire.responses_output import response_of
from helexa.neuron.config import ResponsesConfig

_LONGEST = 100
_NAMES = ("limit", "order", "after", "include")
_PREFIXES = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "compaction": "cmp"}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response, together with the conversation that it ends."""

    principal: str  # name of the principal (API key owner) that owns the response. Other principals cannot read it.
    body: bytes
    items: bytes  # all items of the conversation, including the output items of the response, as a JSON list
    until: float  # time at which the response expires, in seconds of the store's clock

    @property
    def size(self) -> int:
        """Bytes of the response and its conversation."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """Stores responses of the Responses API in memory until they expire.

    If a limit on bytes or entries is exceeded, the store removes the oldest response of the principal that uses the
    most bytes. A principal that fills the store therefore loses its own responses first.
    """

    def __init__(self, config: ResponsesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._mark = secrets.token_hex(4)
        self._most_bytes = config.store_mb << 20
        self._most_entries = config.store_entries
        self._seconds = config.store_secs
        self._clock = clock
        self._entries: dict[str, StoredResponse] = {}  # oldest first
        self._bytes_by_principal: Counter[str] = Counter()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        """Whether the configuration permits storing responses."""
        return self._most_bytes > 0

    @property
    def prefix(self) -> str:
        """Prefix of all response ids, by which gateways find the storing node."""
        return f"resp_{self._mark}"

    def new_stem(self) -> str:
        """Return a random string that a response's ids have in common."""
        return self._mark + secrets.token_hex(12)

    def put(self, id: str, principal: str, body: bytes, items: bytes) -> None:
        """Store a response, unless it is larger than the memory limit."""
        entry = StoredResponse(principal, body, items, self._clock() + self._seconds)
        if entry.size > self._most_bytes:
            return
        self._expire()
        self._entries[id] = entry
        self._bytes_by_principal[principal] += entry.size
        self._bytes += entry.size
        while self._bytes > self._most_bytes or len(self._entries) > self._most_entries:
            greediest = max(self._bytes_by_principal, key=self._bytes_by_principal.__getitem__)
            self._drop(next(id for id, entry in self._entries.items() if entry.principal == greediest))

    def find(self, id: str, principal: str) -> StoredResponse | None:
        """Return the response `id` of `principal`, or None."""
        self._expire()
        entry = self._entries.get(id)
        return entry if entry is not None and entry.principal == principal else None

    def remove(self, id: str, principal: str) -> bool:
        """Remove the response `id`; return False if `principal` has no such response."""
        exists = self.find(id, principal) is not None
        if exists:
            self._drop(id)
        return exists

    def _expire(self) -> None:
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).until <= now:
            self._drop(next(iter(self._entries)))

    def _drop(self, id: str) -> None:
        entry = self._entries.pop(id)
        self._bytes -= entry.size
        self._bytes_by_principal[entry.principal] -= entry.size
        if not self._bytes_by_principal[entry.principal]:
            del self._bytes_by_principal[entry.principal]


def referred(store: ResponseStore, items: Sequence[Item], principal: str) -> dict[str, StoredResponse]:
    """Return the stored responses to whose items `items` refer, by referenced item id.

    Raises:
        ApiError: status 400. Code `unsupported_parameter`: there are references, but the node stores no responses. Code
            `item_not_found`: `principal` owns no stored response to which the item could belong.
    """
    sources: dict[str, StoredResponse] = {}
    for index, item in enumerate(items):
        if not _is_reference(item):
            continue
        field, id = f"input.{index}", str(item["id"])
        if not store.enabled:
            hint = "this node stores no responses; send the item itself"
            raise unsupported_parameter(field, f"'{field}': references to items are not supported: {hint}")
        response = store.find(response_of(id), principal)
        if response is None:
            raise _unknown(field, id)
        sources[id] = response
    return sources


def resolved(items: Sequence[Item], sources: Mapping[str, StoredResponse]) -> list[dict[str, Any]]:
    """Return `items` with references replaced by the referenced items.

    The function is slow for long responses.

    Args:
        sources: the stored responses that contain the referenced items, by the id of the referenced item.

    Raises:
        ApiError: status 400, code `item_not_found`: the stored response has no output item with the id.
    """
    outputs: dict[str, dict[str, Any]] = {}
    resolved_items: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not _is_reference(item):
            resolved_items.append(dict(item))
            continue
        id = str(item["id"])
        response = response_of(id)
        if response not in outputs:
            outputs[response] = {
                output_item["id"]: output_item for output_item in from_json(sources[id].body)["output"]
            }
        if id not in outputs[response]:
            raise _unknown(f"input.{index}", id)
        resolved_items.append(outputs[response][id])
    return resolved_items


def _is_reference(item: Item) -> bool:
    return item.get("type") in (None, "item_reference") and "id" in item and "role" not in item


def _unknown(field: str, id: str) -> ApiError:
    return ApiError(
        400,
        "item_not_found",
        f"{field}: item {id[:256]!r} not found; it may have expired: send the item itself",
        param=field,
    )


@dataclass(frozen=True)
class ItemPage:
    """The page of a stored response's input items that a client requests."""

    limit: int = 20
    newest_first: bool = True
    after: str = ""  # id of the last item on the page before; empty for the first page

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "ItemPage":
        """Return the page that the query parameters `limit`, `order` and `after` describe.

        Raises:
            ApiError: status 400: a parameter is unknown or invalid. The error names the parameter.
        """
        for name in query:
            if name not in _NAMES:
                raise unsupported_parameter(name[:80])
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _LONGEST):
            raise invalid_body(f"limit: must be 1 to {_LONGEST}, not {limit[:20]!r}", "limit")
        if order not in ("asc", "desc"):
            raise invalid_body(f"order: must be 'asc' or 'desc', not {order[:20]!r}", "order")
        return cls(int(limit), order == "desc", query.get("after", ""))

    def listed(self, response: StoredResponse, id: str) -> bytes:
        """Return this page of input items as a JSON list object.

        Raises:
            ApiError: status 400: the response has no input item with the id `after`.
        """
        output = len(orjson.loads(response.body)["output"])
        items = from_json(response.items)
        items = [_shown(item, id, index) for index, item in enumerate(items[: len(items) - output])]
        ids = [item["id"] for item in items]
        if self.newest_first:
            items, ids = items[::-1], ids[::-1]
        if self.after and self.after not in ids:
            raise invalid_body(
                f"after: there is no item {self.after[:80]!r}; leave 'after' out for the first page", "after"
            )
        start = ids.index(self.after) + 1 if self.after else 0
        page = items[start : start + self.limit]
        listed = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + len(page) < len(items),
        }
        return to_json(listed, inf_nan_mode="null")


def _shown(item: dict[str, Any], response: str, index: int) -> dict[str, Any]:
    """Return an input item with all keys that the Responses API requires.

    Args:
        response: id of the response, from which the item's id is derived.
    """
    kind = item.get("type") or "message"
    shown = {"id": f"{_PREFIXES.get(kind, 'msg')}_{response.removeprefix('resp_')}_in{index}", "type": kind, **item}
    if kind == "message":
        content = item.get("content")
        if content is None or isinstance(content, str):
            content_type = "output_text" if item.get("role") == "assistant" else "input_text"
            shown["content"] = [{"type": content_type, "text": content or ""}]
        shown.setdefault("status", "completed")
    return shown
