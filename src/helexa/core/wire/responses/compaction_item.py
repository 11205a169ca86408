"""The item that replaces a compacted conversation. It contains the summary in an encoding that is opaque to clients."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from helexa.core.errors import invalid_body

_MARK = "helexa1."


def compaction_item(id: str, summary: str) -> dict[str, str]:
    """Return the `compaction` item with the id `id` that contains `summary`."""
    content = _MARK + base64.urlsafe_b64encode(summary.encode()).decode()
    return {"type": "compaction", "id": id, "encrypted_content": content}


def summary_in(item: Mapping[str, Any], field: str) -> str:
    """Return the summary in a `compaction` item. `field` is the JSON path of the item, used in the error message.

    Raises:
        ApiError: 400 `invalid_request_body`: the item was not created by `compaction_item`.
    """
    content = item.get("encrypted_content")
    if isinstance(content, str) and content.startswith(_MARK):
        try:
            return base64.urlsafe_b64decode(content[len(_MARK) :]).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            pass
    name = f"{field}.encrypted_content"
    raise invalid_body(f"{name}: must be from this server's /v1/responses/compact", name)
