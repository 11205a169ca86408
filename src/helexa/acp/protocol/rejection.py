"""JSON-RPC error responses to the editor."""

from typing import Any

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
    """Return the error for a line that is not JSON."""
    return RpcError(-32700, "Parse error: each line must be one JSON-RPC message")


def invalid_request(why: str) -> RpcError:
    """Return the error for JSON that is not a JSON-RPC message."""
    return RpcError(-32600, f"Invalid request: {why}")


def method_not_found(method: str) -> RpcError:
    """Return the error for a request with an unknown method name."""
    return RpcError(-32601, f"Method not found: {method[:100]}", {"method": method[:100]})


def invalid_params(why: str) -> RpcError:
    """Return the error for invalid parameters."""
    return RpcError(-32602, f"Invalid params: {why}")


def internal_error(why: str) -> RpcError:
    """Return the error for a request that failed for a reason in the agent, not in the request."""
    return RpcError(INTERNAL_ERROR, why)


def auth_required(why: str) -> RpcError:
    """Return the error for a request that is allowed only after the editor has called `authenticate`."""
    return RpcError(-32000, f"Authentication required: {why}")


def not_found(session_id: str) -> RpcError:
    """Return the error for a request with an unknown session id."""
    return RpcError(-32002, f"There is no session {session_id[:100]!r}", {"sessionId": session_id[:100]})


def cancelled() -> RpcError:
    """Return the error that is the response to a request that the editor canceled."""
    return RpcError(-32800, "Request cancelled")
