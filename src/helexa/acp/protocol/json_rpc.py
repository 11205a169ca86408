"""JSON-RPC: checks the editor's messages, cancels requests, builds errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

INTERNAL_ERROR = -32603


class RpcError(Exception):
    """An error that is sent to the editor as a JSON-RPC error response.

    The message is a sentence for the user and contains no secrets.
    """

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def body(self) -> dict[str, Any]:
        """Return the `error` member of the JSON-RPC response."""
        error = {"code": self.code, "message": self.message}
        return error if self.data is None else error | {"data": self.data}


def parse_error() -> RpcError:
    """Return the JSON-RPC error for a line that is not JSON."""
    return RpcError(-32700, "Parse error: a line is not JSON; send one JSON-RPC message in each line")


def invalid_request(why: str) -> RpcError:
    """Return the JSON-RPC error for JSON that is not a JSON-RPC message."""
    return RpcError(-32600, f"Invalid request: {why}")


def method_not_found(method: str) -> RpcError:
    """Return the JSON-RPC error for a request with an unknown method name."""
    return RpcError(-32601, f"Method not found: {method[:100]}", {"method": method[:100]})


def invalid_params(why: str) -> RpcError:
    """Return the JSON-RPC error for invalid parameters."""
    return RpcError(-32602, f"Invalid params: {why}")


def internal_error(why: str) -> RpcError:
    """Return the JSON-RPC error for a failure of the agent, not of the request."""
    return RpcError(INTERNAL_ERROR, why)


def auth_required(why: str) -> RpcError:
    """Return the JSON-RPC error for a request of an editor that is not signed in."""
    return RpcError(-32000, f"Authentication required: {why}")


def not_found(session_id: str) -> RpcError:
    """Return the JSON-RPC error for a request with an unknown session id."""
    return RpcError(
        -32002,
        f"There is no session {session_id[:100]!r}; session/list lists the saved sessions",
        {"sessionId": session_id[:100]},
    )


def cancelled() -> RpcError:
    """Return the JSON-RPC error that answers a request that the editor canceled."""
    return RpcError(-32800, "Request cancelled")


logger = logging.getLogger(__name__)
MAX_REQUESTS = 1000
CANCEL_METHOD = "$/cancel_request"

RequestId = int | str
Message = dict[str, Any]


class Transport(Protocol):
    """A bidirectional stream of JSON-RPC messages, as the ACP SDK expects it."""

    async def send(self, message: Message) -> None:
        """Send a JSON message to the editor."""
        ...

    async def receive(self) -> Any:
        """Return the next message as parsed JSON, or None at the end of the stream."""
        ...

    async def close(self) -> None:
        """Stop sending messages to the editor."""
        ...


@dataclass(slots=True)
class Request:
    """A JSON-RPC request of the editor to which no response has been sent yet."""

    id: RequestId  # JSON-RPC id of the request
    # Task that handles the request. It is canceled when the editor cancels the request.
    task: asyncio.Task[Any] | None = None
    canceled: bool = False  # whether the editor canceled the request
    # callbacks to run after the response is sent
    after_response: list[Callable[[], None]] = field(default_factory=list)


_request: ContextVar[Request | None] = ContextVar("acp_request", default=None)
_sent_id: ContextVar[int | None] = ContextVar("acp_sent_id", default=None)


def current_request() -> Request | None:
    """Return the JSON-RPC request that this task handles, or None if there is none."""
    return _request.get()


def sent_id() -> int | None:
    """Return the id of the last JSON-RPC request that the current task sent.

    Return None if the task has sent no request.
    """
    return _sent_id.get()


class ValidatingTransport:
    """A JSON-RPC transport that wraps another transport and adds these features:

    * Only valid JSON-RPC messages are returned. An invalid response is dropped. Any other invalid message gets an error
      response.
    * If the editor sends `$/cancel_request` for a request, the handler of the request is canceled. This behavior does
      not depend on the version of the ACP SDK.
    * The callbacks in `Request.after_response` run after the response is sent.
    * Messages are sent one after the other, in the order of the `send` calls.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._requests: dict[RequestId, Request] = {}
        self._unread: Message | None = None
        self._send_lock = asyncio.Lock()
        self._notices: set[asyncio.Future[None]] = set()

    def unread(self, message: Message) -> None:
        """Put a received message back. The next call of `receive` returns it again."""
        self._unread = message

    async def receive(self) -> Message | None:
        """Return the next valid message, or None at the end of the stream.

        If the message is a request, later calls of `current_request` in the calling task return this request.
        """
        if (message := self._unread) is not None:
            self._unread = None
            _request.set(self._requests.get(message["id"]) if "id" in message else None)
            return message
        while (message := await self._inner.receive()) is not None:
            try:
                if (valid_message := self._validated(message)) is not None:
                    return valid_message
            except RpcError as rejection:
                id = message.get("id") if isinstance(message, dict) else None
                if isinstance(id, bool) or not isinstance(id, int | str):
                    id = None
                await self._send({"jsonrpc": "2.0", "id": id, "error": rejection.body()})
        return None

    async def send(self, message: Message) -> None:
        """Send a message of the ACP SDK to the editor.

        If the message is a response, then run the `after_response` callbacks of the request, unless the editor has
        disconnected.
        """
        if "method" in message:
            if message["method"] == CANCEL_METHOD:
                return  # Drop the SDK's own notification, because `cancel_request` sends one already.
            if "id" in message:
                _sent_id.set(message["id"])
            await self._send(message)
            return
        request = self._requests.get(message["id"])
        try:
            await self._send(message)
        except ConnectionError as error:
            logger.debug("response not sent id=%r error=%r", message["id"], str(error))
            return
        finally:
            self._requests.pop(message["id"], None)
        for callback in request.after_response if request is not None else ():
            callback()

    async def close(self) -> None:
        """Stop sending messages to the editor."""
        await self._inner.close()

    async def handled(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run `work`, the handler of the current request, and return its result.

        If the editor sends `$/cancel_request` for the request, `work` is canceled.

        Raises:
            RpcError: the editor canceled the request.
        """
        request, task = current_request(), asyncio.current_task()
        if request is None or task is None:
            return await work()
        if request.canceled:
            raise cancelled()
        request.task = task
        try:
            return await work()
        except asyncio.CancelledError:
            if not request.canceled:
                raise
            task.uncancel()
            raise cancelled() from None
        finally:
            request.task = None

    def cancel_request(self, id: int) -> None:
        """Cancel the agent's request `id` to the editor with `$/cancel_request`."""
        notice = {"jsonrpc": "2.0", "method": CANCEL_METHOD, "params": {"requestId": id}}
        task = asyncio.ensure_future(self._send(notice))
        self._notices.add(task)
        task.add_done_callback(self._notice_sent)

    def _notice_sent(self, task: asyncio.Future[None]) -> None:
        self._notices.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("cancel request not sent error=%r", str(error))

    async def _send(self, message: Message) -> None:
        async with self._send_lock:
            await self._inner.send(message)

    def _validated(self, message: Any) -> Message | None:
        if not isinstance(message, dict):
            raise invalid_request("a message must be a JSON object; batches are not supported")
        method = message.get("method")
        if method is None and ("result" in message or "error" in message):
            return message if _is_response(message) else None
        if not isinstance(method, str):
            raise invalid_request("'method' must be a string; name the method to call")
        if not isinstance(message.get("params", {}), dict | None):
            raise invalid_request("the 'params' of a message must be a JSON object or null")
        _request.set(None)
        if "id" not in message:
            if method != CANCEL_METHOD:
                return message
            self._cancel_handler((message.get("params") or {}).get("requestId"))
            return None
        id = message["id"]
        if isinstance(id, bool) or not isinstance(id, int | str):
            raise invalid_request("the 'id' of a request must be a number or a string")
        if id in self._requests:
            raise invalid_request(f"a request with the 'id' {str(id)[:100]} is not answered yet; use another 'id'")
        if len(self._requests) >= MAX_REQUESTS:
            raise RpcError(
                -32603, f"too many requests: {MAX_REQUESTS} earlier requests are unanswered; wait for their responses"
            )
        self._requests[id] = request = Request(id)
        _request.set(request)
        return message

    def _cancel_handler(self, id: Any) -> None:
        if isinstance(id, bool) or not isinstance(id, int | str):
            return
        request = self._requests.get(id)
        if request is not None and not request.canceled:
            request.canceled = True
            if request.task is not None:
                request.task.cancel()


def _is_response(message: Message) -> bool:
    id, error = message.get("id"), message.get("error")
    if isinstance(id, bool) or not isinstance(id, int):
        return False
    return error is None or (isinstance(error, dict) and isinstance(error.get("code", 0), int))
