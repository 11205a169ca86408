"""Errors of calls to nodes, with their cause in words for an administrator."""

import errno
import os
import re
import socket
import ssl
from collections.abc import Mapping
from typing import Any, Literal

import orjson

from helexa.core.errors import HelexaError
from helexa.core.node_reports import Record, WireInt
from helexa.cortex.upstream.connection_and_timeouts import IncompleteResponseError, UpstreamError

CONNECT_TIMEOUT_SECS = 3.0
_MAX_REASON_CHARS = 300


class MemoryRejection(Record):
    """The error fields of a load that a node rejected for lack of memory."""

    kind: Literal["does_not_fit"]
    required_mb: WireInt  # MB that the model needs
    free_mb: WireInt  # MB that the node has for the model
    permanent: bool = True  # True if the model would not fit even if the node had no other models


class NodeError(HelexaError):
    """Raised if a node did not answer, or answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        temporary: bool = True,
        local: bool = False,
        timed_out: bool = False,
        memory: MemoryRejection | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        # The required and the free memory, if the node rejected a load that would fit after other models are unloaded.
        # Otherwise None.
        self.memory = memory
        self.status = status  # HTTP status of the answer; None without an answer, and for loads and unloads
        self.temporary = temporary  # True if the same call may succeed later
        # True if the call failed because the gateway itself is out of file descriptors, ports or memory
        self.local = local
        self.timed_out = timed_out  # True if the node accepted the connection, but did not answer in time


def failure_reason(error: UpstreamError, endpoint: str, path: str, *, begun: bool) -> str:
    """Return why a node's response is missing, or incomplete if it had `begun`."""
    cause = error.__cause__
    match cause:
        case socket.gaierror():
            return f"the host name of {endpoint} cannot be resolved; check the name and the DNS"
        case ssl.SSLCertVerificationError():
            return f"the TLS certificate of {endpoint} is not trusted; name the CA's file in gateway.ca_file"
        case ssl.SSLError():
            return f"no TLS connection to {endpoint}; check whether the node speaks http instead of https"
        case TimeoutError(errno=None):
            secs = f"{CONNECT_TIMEOUT_SECS:.0f} s"
            return f"no connection to {endpoint} within {secs}; check that the node runs and its port is open"
        case OSError() if number := _error_number(cause):
            hint = "; check that the node runs" if number == errno.ECONNREFUSED else ""
            return f"{os.strerror(number).lower()} at {endpoint}{hint}"
    if isinstance(error, IncompleteResponseError):
        if error.is_invalid:
            return f"{endpoint} answered {path} with invalid HTTP ({error}); check the endpoint of the node"
        if begun:
            return f"{endpoint} closed the connection within its answer to {path}; see the node's log"
        return f"{endpoint} closed the connection without an answer to {path}; see the node's log"
    return f"the request for {path} at {endpoint} failed: {type(cause or error).__name__}; see the node's log"


def _error_number(error: OSError) -> int:
    """Return the errno of a connection error, or 0 if it has none.

    If several addresses were tried, the error has no errno. Its text then contains the errno for each address, and the
    first one is returned.
    """
    if error.errno is not None and error.errno > 0:
        return error.errno
    match = re.search(r"\[Errno (\d+)\]", str(error))
    return int(match[1]) if match else 0


def error_reason(body: bytes) -> tuple[str, Mapping[str, Any]]:
    """Return the message and the fields in the body of a node's error response.

    The body has the form `{"error": "text"}` or `{"error": {"kind": ..., "message": ...}}`. Otherwise the message is
    empty. The fields are the fields of the second form; empty in all other cases.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", {}
    error = content.get("error") if isinstance(content, Mapping) else None
    details: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
    if isinstance(error, Mapping):
        error = error.get("message") or error.get("kind")
    if not isinstance(error, str):
        return "", details
    line = " ".join(error.split())
    return line[:_MAX_REASON_CHARS], details


def memory_rejection(details: Mapping[str, Any]) -> MemoryRejection | None:
    """Return the fields of a load rejection that an unload can resolve, else None."""
    try:
        rejection = MemoryRejection.model_validate(details)
    except ValueError:
        return None
    return None if rejection.permanent else rejection
