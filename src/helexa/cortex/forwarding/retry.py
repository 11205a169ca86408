"""Retry on another node: how an attempt failed, whether to retry, and the error."""

from collections.abc import Sequence
from typing import Literal, NoReturn

from helexa.core.errors import ApiError
from helexa.cortex.backends.answer import NodeResponse
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.request_record import UPSTREAM_TIMEOUT, RequestRecord
from helexa.cortex.upstream.connection_and_timeouts import ConnectError, ReadTimeoutError, UpstreamError
from helexa.cortex.upstream.error_responses import CONTEXT_LENGTH_EXCEEDED

BUSY_STATUSES = (429, 503, 529)
# Statuses of errors in the request's content. Another node would probably give the same error.
CONTENT_ERRORS = frozenset({400, 409, 415, 422})

_KINDS = (b"application/json", b"text/event-stream")
_FAST_SECS = 5.0  # a 504 within this time is not the result of a long computation

Outcome = Literal["unreached", "broken", "silent", "busy", "gone", "unfit", "declined", "failed"]
"""How an attempt to forward a request failed before the first byte of a response.

* `unreached`: the connection failed.
* `broken`: the connection ended, or the bytes were not HTTP.
* `silent`: a timeout expired.
* `busy`: the node answered 429, 503 or 529.
* `gone`: the node does not have the model any more.
* `unfit`: the prompt is longer than the context of the model on this node. This is not a failure of the node.
* `declined`: the node gave an error response without processing the request, such as 401 or 413.
* `failed`: the node gave another error response, such as 500, but not about the request's content.
"""


class NoResponse(Exception):
    """The node failed or was busy before the client got a byte: a retry may follow."""

    def __init__(self, reason: str, outcome: Outcome, error_response: ApiError) -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome  # kind of failure. It decides whether a retry is allowed.
        # error to send to the client if the request is not retried on another node
        self.error_response = error_response


def may_retry(outcomes: Sequence[Outcome]) -> bool:
    """Return whether another node may get the request after attempts with `outcomes`.

    The result depends on how the last attempt failed:

    * `unreached`, `busy`, `gone`, `unfit`, `declined`: True, because the node has not processed the request.
    * `broken`, `failed`: True after the first such failure, False after the second. The request may crash nodes, so it
      must not reach a third node.
    * `silent`: False, because the node may still be working on the request.
    """
    last_outcome = outcomes[-1]
    if last_outcome in ("unreached", "busy", "gone", "unfit", "declined"):
        return True
    return last_outcome != "silent" and outcomes.count("broken") + outcomes.count("failed") == 1


def no_connection(error: UpstreamError, node: str) -> NoResponse:
    """Return the `NoResponse` for a connection to `node` that failed with `error`."""
    if isinstance(error, ReadTimeoutError):
        return NoResponse(reason(error), "silent", timed_out(node))
    return NoResponse(reason(error), "unreached" if isinstance(error, ConnectError) else "broken", unreachable(node))


def error_outcome(status: int, error: ApiError) -> Outcome | None:
    """Return how an attempt with an error response failed.

    None means that the error is about the request's content, so another node would probably give the same error.
    """
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        return "unfit"  # the context of the model may be larger on another node
    if status in CONTENT_ERRORS:
        return None
    if status == 503 and error.code == "service_unavailable":
        return "failed"  # not `busy`: the request may have crashed the node's engine
    if status in BUSY_STATUSES:
        return "busy"
    return "declined" if status < 500 or status == 501 else "failed"


def retry_after(node_response: NodeResponse) -> int | None:
    """Return the seconds in the `Retry-After` header; None if absent or not a number."""
    text = next((value for name, value in node_response.headers if name == b"retry-after"), b"")
    return int(text) if text.isdigit() and len(text) < 6 else None


def reason(error: UpstreamError) -> str:
    """Return the text of a failed attempt's error, for the log."""
    return f"{type(error).__name__} ({error})"


def timed_out(node: str) -> ApiError:
    """Return an attempt's 504 error: the node sent nothing within a timeout."""
    return ApiError(
        504,
        UPSTREAM_TIMEOUT,
        f"node '{node}' sent no bytes for longer than the gateway's timeout; try again, or raise "
        "gateway.answer_timeout_secs or gateway.idle_timeout_secs",
        type="api_error",
    )


def unreachable(node: str) -> ApiError:
    """Return an attempt's 502 error: the node is unreachable, or does not speak HTTP."""
    return ApiError(502, "upstream_connection_error", f"node '{node}' did not respond; try again", type="api_error")


def is_from_proxy(node_response: NodeResponse, kind: str) -> bool:
    """Return whether another server, such as a proxy, answered instead of the node.

    Third-party backends may answer with any successful status and any content type except that of web pages.
    """
    if node_response.status >= 400:
        return node_response.status in (502, 504)
    if kind != "neuron" and 200 <= node_response.status < 300:
        return any(name == b"content-type" and b"html" in value.lower() for name, value in node_response.headers)
    kinds = [value for name, value in node_response.headers if name == b"content-type"]
    return node_response.status != 200 or not kinds or not kinds[0].lower().startswith(_KINDS)


def reject_proxy_response(fleet: Fleet, node_response: NodeResponse, record: RequestRecord) -> NoReturn:
    """Raise `NoResponse`, because a proxy answered; count the failure of the node."""
    node, status = record.node, node_response.status
    text = f"a proxy or another server answered HTTP {status} instead of the node"
    if status != 504:
        count_failure(fleet, record, silent=False)
        raise NoResponse(text, "broken", unreachable(node))
    if (record.answered or 0.0) < _FAST_SECS:
        fleet.busy(node, record.model)
        raise NoResponse(text, "failed", timed_out(node))
    count_failure(fleet, record, silent=True)
    raise NoResponse(text, "silent", timed_out(node))


def count_failure(fleet: Fleet, record: RequestRecord, *, silent: bool) -> None:
    """Report an attempt's transport failure to the breaker of node, model and client.

    A timeout (`silent`) of a node that still responds to polls is not reported.
    """
    # Perhaps only this request is slow.
    if not (silent and fleet.is_alive(record.node)):
        fleet.transport_failed(record.node, record.model, record.requester.client)
