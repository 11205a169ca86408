"""Converts deltas of a node's stream to content blocks of a Messages API stream.

Clients support only one open block at a time, but a node may interleave the deltas of several tool calls. The deltas of
a block are therefore buffered until all earlier blocks have ended.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from helexa.core.sse import frame
from helexa.cortex.anthropic.message_and_errors import SIGNATURE, new_call_id, text_block
from helexa.cortex.forwarding.translated_reply import call_as_text
from helexa.cortex.upstream.response_body import as_json, malformed, parse_arguments

MAX_BUFFERED_CHARS = 4 << 20
MAX_CALLS = 512
MAX_NAME_CHARS = 1024

Kind = Literal["thinking", "text", "tool_use"]

_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
_DELTAS = {
    "thinking": (b"thinking_delta", b"thinking"),
    "text": (b"text_delta", b"text"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
_SIGNATURE = SIGNATURE.encode()
_BLOCK_CHARS = 256  # fixed memory cost of a block, in characters


@dataclass(eq=False)
class _Block:
    """One content block of a streamed message."""

    kind: Kind
    id: str = ""
    name: str = ""
    # received pieces of a tool call's arguments, which are JSON text
    arguments: list[str] = field(default_factory=list[str])
    # deltas that are not sent yet because `content_block_start` was not sent yet
    pending: list[str] = field(default_factory=list[str])
    begun: bool = False  # True after `content_block_start` was sent
    ended: bool = False  # True after `content_block_stop` was sent
    delta_head: bytes = b""  # constant first bytes of the block's `content_block_delta` events, up to the delta's text
    # cached result of `is_complete`: number of pieces in `arguments`, and whether they form a complete JSON object
    _completeness: tuple[int, bool] = (-1, False)

    def is_complete(self) -> bool:
        """Return whether the block can be ended with `content_block_stop`."""
        # Only a tool call can be incomplete, if it lacks a name or its arguments are not a whole JSON object yet.
        if self.kind != "tool_use":
            return True
        last_delta = self.arguments[-1].rstrip() if self.arguments else ""
        # Most deltas do not end with a brace. Parsing after each of them would cost quadratic time.
        if last_delta and not last_delta.endswith("}"):
            return False
        if self._completeness[0] != len(self.arguments):
            self._completeness = len(self.arguments), parse_arguments("".join(self.arguments)) is not None
        return bool(self.name) and self._completeness[1]

    def decode_arguments(self) -> None:
        """Decode arguments that the node encoded twice, as a JSON string."""
        text = "".join(self.arguments)
        if not self.begun and text.startswith('"') and (arguments := parse_arguments(text)) is not None:
            self.arguments = self.pending = [as_json(arguments).decode()]

    def may_begin(self) -> bool:
        """Return whether the block can be started."""
        # A tool call needs its name, which `content_block_start` contains, and arguments that begin with a brace. At
        # the end of the stream, a call with other arguments is sent as text.
        return self.kind != "tool_use" or (bool(self.name and self.arguments) and self.arguments[0].startswith("{"))

    def chars(self) -> int:
        """Return the buffered characters, plus a constant for the block's memory."""
        return _BLOCK_CHARS + sum(map(len, self.arguments)) + sum(map(len, self.pending))


class Blocks:
    """Converts deltas of text, thinking and tool calls to events of content blocks.

    Deltas of the open block are emitted immediately. Deltas of later blocks are buffered until the open block has
    ended.
    """

    def __init__(self, emit: Callable[[bytes], None]) -> None:
        self.called = False  # True if at least one tool call was sent, and all sent tool calls had complete arguments
        self.delta_count = 0  # number of emitted deltas
        self._emit = emit  # called with the bytes of each event
        self._queue: deque[_Block] = deque()
        self._calls: dict[int, _Block] = {}
        self._block_count = 0
        self._buffered_chars = 0

    def add_text(self, kind: Literal["thinking", "text"], text: str) -> None:
        """Add a delta of text or thinking.

        Raises:
            ApiError: 502 `upstream_malformed_response`: more than `MAX_BUFFERED_CHARS` characters are buffered.
        """
        block = self._queue[-1] if self._queue else None
        if block is None or block.kind != kind:
            block = self._append(_Block(kind))
        self._add(block, text)

    def add_call(self, delta: Any) -> None:
        """Add a delta of a tool call: one element of `delta.tool_calls` of a chunk.

        Raises:
            ApiError: 502 `upstream_malformed_response`: the delta is malformed, there are more than `MAX_CALLS` calls,
                or more than `MAX_BUFFERED_CHARS` characters are buffered.
        """
        function = delta.get("function") or {} if isinstance(delta, dict) else None
        if not isinstance(function, dict):
            raise malformed("a tool call in the response is not a JSON object")
        name, arguments, call_id = function.get("name"), function.get("arguments"), delta.get("id")
        name, call_id = (value if isinstance(value, str) else "" for value in (name, call_id))
        if len(name) + len(call_id) > MAX_NAME_CHARS:
            raise malformed(
                f"the name and id of a tool call in the response have more than {MAX_NAME_CHARS} characters"
            )
        block = self._call_block(delta.get("index"), name, call_id)
        block.name, block.id = block.name or name, block.id or call_id
        if isinstance(arguments, dict):
            arguments = as_json(arguments).decode()
        if not isinstance(arguments, str):
            return
        if not block.arguments:
            arguments = arguments.lstrip()  # clients fail if all arguments are white space
        if not arguments:
            return
        if not block.ended:
            block.arguments.append(arguments)
            self._count_chars(len(arguments))
            self._add(block, arguments)
        elif arguments.strip():
            raise malformed("arguments of a tool call arrived after the end of the call")

    def close(self, *, cut_off: bool) -> None:
        """End the open block and send the buffered blocks, at the end of the stream.

        If there was no block, send an empty text block.

        Args:
            cut_off: True if the response reached its length limit. An incomplete tool call is then sent as a tool call
                instead of text, if the node has sent its name and the beginning of its arguments.
        """
        incomplete = False
        while self._queue:
            block = self._queue.popleft()
            if block.kind == "tool_use" and not block.name and not block.arguments:
                continue
            block.decode_arguments()
            if not block.is_complete():
                # A call stays a call if the client already has its start, or if the length limit cut it off. Any other
                # incomplete call is sent as text.
                if block.begun or (cut_off and block.may_begin()):
                    incomplete = True
                else:
                    block = _Block("text", pending=[call_as_text(block.name, "".join(block.arguments))])
            self._end(block)
        self.called = self.called and not incomplete
        if not self._block_count:
            self._end(_Block("text"))

    def _call_block(self, index: Any, name: str, call_id: str) -> _Block:
        """Return the block of a tool-call delta, which may begin a new tool call."""
        # Some nodes omit the index. In this case, a delta with a name begins a new call. Other nodes send the same
        # index for all calls. In this case, a delta with a name and another id begins a new call.
        if type(index) is not int:
            index = len(self._calls) - (0 if name else 1)
        block = self._calls.get(index)
        if block is not None and not (name and call_id and block.id and call_id != block.id):
            return block
        if len(self._calls) >= MAX_CALLS:
            raise malformed(f"the response has more than {MAX_CALLS} tool calls")
        # The node gives all tool calls the same index, so the earlier call gets another, unused index.
        if block is not None:
            self._calls[-1 - len(self._calls)] = block
        self._calls[index] = block = self._append(_Block("tool_use"))
        return block

    def _append(self, block: _Block) -> _Block:
        self._queue.append(block)
        self._count_chars(_BLOCK_CHARS)
        return block

    def _add(self, block: _Block, text: str) -> None:
        if block.begun:
            self._delta(block, text)
            if len(self._queue) == 1:
                return
        else:
            block.pending.append(text)
            self._count_chars(len(text))
        # `may_begin` is false for a tool call without arguments, so the call is not ended: arguments may follow.
        while len(self._queue) > 1 and self._queue[0].may_begin() and self._queue[0].is_complete():
            self._end(self._queue.popleft())
        if not self._queue[0].begun and self._queue[0].may_begin():
            self._begin(self._queue[0])

    def _begin(self, block: _Block) -> None:
        content: dict[str, Any] = {"type": block.kind}
        if block.kind == "tool_use":
            self.called = True
            content |= {"id": block.id or new_call_id(), "name": block.name, "input": {}}
        elif block.kind == "text":
            content |= text_block("")
        else:
            content |= {"thinking": "", "signature": ""}
        start = {"type": "content_block_start", "index": self._block_count, "content_block": content}
        self._emit(frame(orjson.dumps(start), "content_block_start"))
        kind, delta_field = _DELTAS[block.kind]
        block.delta_head = b'%b%d,"delta":{"type":"%b","%b":' % (_DELTA, self._block_count, kind, delta_field)
        block.begun = True
        self._block_count += 1
        self._buffered_chars -= sum(map(len, block.pending))
        pending_deltas, block.pending = block.pending, []
        for text in pending_deltas:
            self._delta(block, text)

    def _delta(self, block: _Block, text: str) -> None:
        self.delta_count += 1
        self._emit(block.delta_head + orjson.dumps(text) + b"}}\n\n")

    def _end(self, block: _Block) -> None:
        if not block.begun:
            self._begin(block)
        index = self._block_count - 1
        if block.kind == "thinking":
            self._emit(b'%b%d,"delta":{"type":"signature_delta","signature":"%b"}}\n\n' % (_DELTA, index, _SIGNATURE))
        self._emit(b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % index)
        self._buffered_chars -= block.chars()
        block.ended, block.arguments = True, []

    def _count_chars(self, chars: int) -> None:
        self._buffered_chars += chars
        if self._buffered_chars > MAX_BUFFERED_CHARS:
            raise malformed(
                f"the response has more than {MAX_BUFFERED_CHARS} characters in and after an unfinished tool call"
            )
