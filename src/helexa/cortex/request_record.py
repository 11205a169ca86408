"""The record of one request.

The record is filled during the request, and written to metrics and logs when the request ends.
"""

import time
from typing import Any

import msgspec

from helexa.core import tracing
from helexa.cortex.access.keys import Principal
from helexa.cortex.fleet.ejection import Requester
from helexa.cortex.ledger.activity_and_usage_totals import Activity
from helexa.cortex.routing import WarmRoute
from helexa.cortex.upstream.usage_meter import Meter, Usage

UNRESOLVED = "unknown"
NO_NODE = "none"
CLIENT_CLOSED_REQUEST = 499  # logged status of a request whose client disconnected; nginx uses the same number
# Error code of a request whose node sent nothing until a timeout expired. The node may still process the request.
UPSTREAM_TIMEOUT = "upstream_timeout"
_MIN_WINDOW_SECS = 0.1
_MAX_NAME_CHARS = 200


class RequestRecord(msgspec.Struct):
    """The record of one request and its response."""

    request_id: str = ""  # id of the request in headers, logs and the ledger
    api: str = ""
    client: str = ""  # IP address of the client. Empty if it is unknown.
    # account and key that the request is billed to, or None for an anonymous request
    principal: Principal | None = None
    name: str = ""  # model name in the client's request. Empty until the body is parsed.
    model: str = UNRESOLVED  # id of the requested model, or `unknown` if `name` is not the name of a known model
    node: str = NO_NODE  # name of the last node that the request was forwarded to, or `none`
    route: str = ""  # reason why the router chose the node
    # names of the nodes that gave an error response before the request was sent to another node
    failed_nodes: list[str] = msgspec.field(default_factory=list[str])
    target: WarmRoute | None = None  # the node and its URL for the model. None before the request is forwarded.
    # Id under which the node stores the token counts of this request. Empty if the node does not store them.
    usage_id: str = ""
    # hash of the session or of the prompt's beginning, by which the router prefers a node. None without affinity.
    affinity_key: bytes | None = None
    status: int = 0  # HTTP status sent to the client: 0 before it is sent, 499 if the client disconnected
    code: str | None = None  # error code of the response; None without an error
    failed: bool = False  # True if the request was rejected, or the node did not complete the response
    client_gone: bool = False  # True if the client disconnected before the response was complete
    estimated: bool = False  # True if the gateway estimated the usage, because the node did not report it
    prompt_estimate: int = 0  # estimated number of prompt tokens
    # Object that measures token usage and timing of the response. None before the response begins.
    meter: Meter | None = None
    usage: Usage | None = None  # token counts of prompt and response, or None before they are known
    span: Any = None  # OpenTelemetry span of the request, or None without tracing
    started: float = msgspec.field(default_factory=time.perf_counter)  # when the request arrived (`time.perf_counter`)
    started_at: float = msgspec.field(default_factory=time.time)  # when the request arrived (Unix seconds)
    read: float = 0.0  # when the last byte of the body arrived (`time.perf_counter`). 0 before the body is complete.
    loading: float = 0.0  # seconds that the request waited for its model to load
    waited: float | None = None  # seconds from arrival until the request was forwarded to a node, including `loading`
    answered: float | None = None  # seconds from forwarding until the first byte of the node's response arrived
    duration: float = 0.0  # seconds from arrival to the end of the response
    _requester: Requester | None = None

    @property
    def requester(self) -> Requester:
        """The client (its account, or else its address) and the API path.

        The value is cached at the first use, so later changes of the record do not affect it.
        """
        if self._requester is None:
            account = self.principal.account_id if self.principal else f"@{self.client}"
            self._requester = Requester(account, self.api)
        return self._requester

    @property
    def overhead(self) -> float | None:
        """Seconds of the gateway's own work before it forwarded the request.

        The time for receiving the body and the time for loading the model are not included. The value is None if the
        request was not forwarded.
        """
        if self.waited is None:
            return None
        return max(0.0, self.started + self.waited - self.read - self.loading)

    def end(self) -> None:
        """Set `duration`, `usage` and `failed` at the end of the response.

        If the client disconnected, set `status` to 499. If the usage is then unknown although the request was
        forwarded, estimate the usage.
        """
        self.duration = time.perf_counter() - self.started
        if self.meter is not None:
            self.usage = self.usage or self.meter.usage()
            self.failed |= self.meter.failed()
        if self.client_gone:
            self.status = CLIENT_CLOSED_REQUEST
            if self.usage is None and self.target is not None:
                completion_tokens = 0 if self.meter is None else self.meter.estimated_tokens()
                self.usage, self.estimated = Usage(self.prompt_estimate, completion_tokens), True

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request's arrival to the first content of a stream.

        The value is None if the response is no stream, or has no content yet.
        """
        if self.meter is None or self.meter.first_at is None:
            return None
        return self.meter.first_at - self.started

    @property
    def tokens_per_second(self) -> float | None:
        """Completion tokens per second, from a stream's first content to its last bytes.

        If this time is unknown or too short, the time from forwarding the request to the end of the response is used.
        The value is None without completion tokens.
        """
        measured_secs = self.duration - (self.waited or 0.0)
        if self.usage is None or not self.usage.completion or measured_secs <= 0:
            return None
        if self.meter and self.meter.first_at is not None and self.meter.last_at is not None:
            generation_secs = self.meter.last_at - self.meter.first_at
            measured_secs = generation_secs if generation_secs >= _MIN_WINDOW_SECS else measured_secs
        return self.usage.completion / measured_secs

    def end_span(self) -> None:
        """End the OpenTelemetry span of the request."""
        usage = self.usage or Usage()
        tracing.end_server_span(
            self.span,
            self.status,
            {
                "http.request.method": "POST",
                "url.path": self.api,
                "client.address": self.client or None,
                "error.type": self.code,
                "gen_ai.request.model": self.model,
                "gen_ai.usage.input_tokens": usage.prompt,
                "gen_ai.usage.output_tokens": usage.completion,
                "helexa.request_id": self.request_id,
                "helexa.key_id": self.principal.key_id if self.principal else None,
                "helexa.node": self.node,
                "helexa.load_secs": self.loading,
                "helexa.ttft_secs": self.time_to_first_token,
            },
        )

    def activity(self) -> Activity:
        """Return this request as a row of the activity log. Valid after `end`."""
        usage, ttft = self.usage or Usage(), self.time_to_first_token
        name = self.name[:_MAX_NAME_CHARS]
        return Activity(
            request_id=self.request_id,
            started_ms=round(self.started_at * 1000),
            api=self.api,
            model=name if name and self.model == UNRESOLVED else self.model,
            status=self.status,
            duration_ms=self.duration * 1000,
            account_id=self.principal.account_id if self.principal else None,
            key_id=self.principal.key_id if self.principal else None,
            alias=name if name and self.model not in (name, UNRESOLVED) else None,
            node=self.node,
            route=self.route or None,
            error_code=self.code,
            prompt=usage.prompt,
            completion=usage.completion,
            cached=usage.cached,
            ttft_ms=None if ttft is None else ttft * 1000,
            waited_ms=(self.waited or 0.0) * 1000,
            tokens_per_second=self.tokens_per_second,
            client_gone=self.client_gone,
            client=self.client or None,
        )

    def facts(self) -> dict[str, Any]:
        """Return the fields of the request's log line, except the request id.

        `requested` is the model name in the client's request, if this name is an alias or is not a known model.
        """
        ttft, usage = self.time_to_first_token, self.usage or Usage()
        requested = {} if self.name in ("", self.model) else {"requested": self.name[:_MAX_NAME_CHARS]}
        return {
            "api": self.api,
            "client": self.client,
            "key": self.principal.key_id if self.principal else None,
            "model": self.model,
            **requested,
            "node": self.node,
            "status": self.status,
            "code": self.code,
            "failed": self.failed,
            "ttft_ms": None if ttft is None else round(ttft * 1000),
            "duration_ms": round(self.duration * 1000),
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "estimated": self.estimated,
            "client_gone": self.client_gone,
        }
