"""Convert the output events of a run to the response of `/v1/responses/compact`."""

import secrets
import time

import orjson

from helexa.core.wire.responses.compaction_item import compaction_item
from helexa.neuron.events import Finished, InferenceEvent, TextDelta, WasReasoning
from helexa.neuron.routes.projectors.response_projector import usage_of


class CompactionProjector:
    """Converts the text of a run to a response with one item, which summarizes a conversation. It is never streamed."""

    def __init__(self) -> None:
        self._stem = secrets.token_hex(16)
        self._texts: list[str] = []
        self._end: Finished | None = None

    def frames(self, event: InferenceEvent) -> bytes:
        """Return no bytes, because this response is never streamed."""
        return b""

    def take(self, event: InferenceEvent) -> None:
        """Record the text or the token counts in `event` for the body."""
        match event:
            case TextDelta(text):
                self._texts.append(text)
            case WasReasoning():
                self._texts.clear()
            case Finished():
                self._end = event
            case _:
                pass

    def body(self) -> bytes:
        """Return the response body as JSON. `usage` is the last key, because gateways look for it at the end."""
        assert self._end is not None
        value = {
            "id": f"resp_{self._stem}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [compaction_item(f"cmp_{self._stem}", "".join(self._texts).strip())],
            "usage": usage_of(self._end),
        }
        return orjson.dumps(value)
