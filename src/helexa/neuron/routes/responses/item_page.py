"""Return the input items of a stored response page by page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.neuron.requests.response_store import StoredResponse

_LONGEST = 100
_NAMES = ("limit", "order", "after", "include")
_PREFIXES = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "compaction": "cmp"}


@dataclass(frozen=True)
class ItemPage:
    """The page of input items that a client requests.

    Attributes:
        limit: maximum number of items on the page.
        newest_first: whether the newest item comes first (`order=desc` in the query).
        after: id of the last item on the page before; empty for the first page.
    """

    limit: int = 20
    newest_first: bool = True
    after: str = ""

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
            raise invalid_body(f"limit: must be 1 to {_LONGEST}", "limit")
        if order not in ("asc", "desc"):
            raise invalid_body("order: must be 'asc' or 'desc'", "order")
        return cls(int(limit), order == "desc", query.get("after", ""))

    def listed(self, response: StoredResponse, id: str) -> bytes:
        """Return this page of the input items of `response`, as a JSON list object of the Responses API.

        Args:
            response: the stored response.
            id: id of the response.

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
            raise invalid_body(f"after: there is no item {self.after[:80]!r}", "after")
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
    """Return an input item with all keys that the Responses API requires. The client may have omitted some of them.

    Args:
        item: the input item as the client sent it.
        response: id of the response, from which the item's id is derived.
        index: position of the item among the input items.
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
