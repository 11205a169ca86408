"""The list of models in the format of Anthropic's API, which returns the list in pages."""

from collections.abc import Mapping, Sequence
from typing import Any

from helexa.cortex.anthropic.errors import invalid_anthropic_body
from helexa.cortex.fleet.capabilities import VISION

VERSION_HEADER = "anthropic-version"
"""A request with this header gets responses in Anthropic's formats."""

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000
_UNKNOWN_TIME = "1970-01-01T00:00:00Z"  # Anthropic's value for models whose release time is unknown


def anthropic_model(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of `/v1/models` from OpenAI's format to Anthropic's format."""
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": _UNKNOWN_TIME,
        "lifecycle": "active",
        "max_input_tokens": entry.get("max_model_len") or entry.get("max_input_tokens"),
        "max_tokens": entry.get("max_output_tokens") or entry.get("max_model_len"),
        "capabilities": _capabilities(entry),
    }


def anthropic_page(entries: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of `entries` that the query parameters `limit`, `after_id` and `before_id` select.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: `limit` is out of range, `after_id` and `before_id` are both set, or no
            entry has the given id.
    """
    limit = _limit(query.get("limit"))
    ids = [entry["id"] for entry in entries]
    after_id, before_id = query.get("after_id"), query.get("before_id")
    if after_id and before_id:
        raise invalid_anthropic_body("before_id", "excludes 'after_id'")
    start = _index_of(ids, after_id, "after_id") + 1 if after_id else 0
    end = _index_of(ids, before_id, "before_id") if before_id else len(ids)
    page = entries[start:end][-limit:] if before_id else entries[start:end][:limit]
    return {
        "data": [anthropic_model(entry) for entry in page],
        "has_more": len(page) < end - start,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _capabilities(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the capabilities of a model in Anthropic's format, or None if they are unknown."""
    names = entry.get("capabilities")
    if not names:
        return None
    no, yes = {"supported": False}, {"supported": True}
    reasons = {"supported": bool(entry.get("reasoning"))}
    return {
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": no,
        "effort": reasons | dict.fromkeys(("low", "medium", "high", "xhigh", "max"), reasons),
        "image_input": {"supported": VISION in names},
        "pdf_input": no,
        "server_tools": no | {"code_execution": no, "web_search": no},
        "structured_outputs": yes,
        "thinking": reasons | {"types": dict.fromkeys(("adaptive", "enabled", "between_tools", "disabled"), yes)},
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= _MAX_LIMIT:
        raise invalid_anthropic_body("limit", f"must be an integer from 1 to {_MAX_LIMIT}")
    return limit


def _index_of(ids: Sequence[str], id: str, field: str) -> int:
    if id not in ids:
        raise invalid_anthropic_body(field, f"model '{id[:200]}' not found")
    return ids.index(id)
