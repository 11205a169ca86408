"""Responses to clients of OpenAI's Responses API, which has its own format of error events."""

import re

import orjson
from starlette.types import Message, Send

from helexa.core.errors import ApiError
from helexa.core.sse import frame
from helexa.cortex.replies.reply import Reply

_EVENT = re.compile(rb"^data:", re.MULTILINE)


class ResponseReply(Reply):
    """One response to a client of the Responses API.

    The object counts the events of a stream, because an error event must contain the next sequence number.
    """

    def __init__(self, send: Send) -> None:
        super().__init__(self._count_and_send)
        self._send_on = send
        self._events = 0

    async def _count_and_send(self, message: Message) -> None:
        self._events += len(_EVENT.findall(message.get("body", b"")))
        await self._send_on(message)

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails with `error`, in the format of the Responses API."""
        event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        return frame(orjson.dumps(event | {"sequence_number": self._events}), "error")
