"""How a request of the client is refused."""

from typing import Any

INTERNAL_ERROR = -32603


class Refusal(Exception):
    """A JSON-RPC error for the client; the message is a sentence for the user, free of secrets."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def body(self) -> dict[str, Any]:
        """The `error` member of the response."""
        error = {"code": self.code, "message": self.message}
        return error if self.data is None else error | {"data": self.data}


def parse_error() -> Refusal:
    """A line that is no JSON."""
    return Refusal(-32700, "Parse error: each line must be one JSON-RPC message")


def invalid_request(why: str) -> Refusal:
    """JSON that is no JSON-RPC message."""
    return Refusal(-32600, f"Invalid request: {why}")


def method_not_found(method: str) -> Refusal:
    """A method that is not offered."""
    return Refusal(-32601, f"Method not found: {method[:100]}", {"method": method[:100]})


def invalid_params(why: str) -> Refusal:
    """Parameters that do not fit the method."""
    return Refusal(-32602, f"Invalid params: {why}")


def internal_error(why: str) -> Refusal:
    """Something went wrong here."""
    return Refusal(INTERNAL_ERROR, why)


def auth_required(why: str) -> Refusal:
    """Nothing can be done before `authenticate`."""
    return Refusal(-32000, f"Authentication required: {why}")


def not_found(session_id: str) -> Refusal:
    """A session that neither lives nor is saved."""
    return Refusal(-32002, f"There is no session {session_id[:100]!r}", {"sessionId": session_id[:100]})


def cancelled() -> Refusal:
    """A request that its sender took back."""
    return Refusal(-32800, "Request cancelled")
