"""Records of requests, and the metrics that are computed from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

Status = Literal["ok", "rejected", "timeout", "error", "incomplete", "cancelled"]
"""Result of a request.

* `ok`: the response is complete.
* `rejected`: the server was overloaded and returned status 429, 503 or 529.
* `timeout`: the request exceeded its time limit.
* `error`: the server returned another error status, or could not be reached.
* `incomplete`: the response began but did not end properly.
* `cancelled`: the benchmark canceled the request on purpose.
"""

Role = Literal["load", "probe", "turn"]
"""Purpose of a request within the benchmark load.

* `load`: the request generates load.
* `probe`: the request measures latency while other requests generate load.
* `turn`: the request continues a conversation.
"""

DeltaKind = Literal["text", "reasoning", "tool"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A received chunk in the record of a request: text, reasoning or tool call."""

    at: float  # arrival time on the client's clock, in seconds
    kind: DeltaKind  # kind of the content
    tokens: int | None = None  # completion tokens so far, or None if the server does not report them with each chunk


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in the record of a request. `arguments` is JSON text as received."""

    name: str
    arguments: str


@dataclass(slots=True)
class RequestRecord:
    """The times and the response of one request.

    Times are seconds on the client's monotonic clock.
    """

    scheduled: float  # time at which the request should be sent. Equal to `sent` if the request has no schedule.
    sent: float  # time just before the request was sent
    ended: float  # time at which the response ended or failed
    status: Status
    role: Role = "load"
    http_status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    deltas: list[Delta] = field(default_factory=list[Delta])
    # counts reported by the server, or None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    # durations in seconds reported by the server, or None
    prefill_s: float | None = None
    decode_s: float | None = None
    queue_s: float | None = None
    # Texts of the received chunks, without reasoning. `text` joins them only when read, because joining at each chunk
    # would take time, which would be measured.
    texts: list[str] = field(default_factory=list[str])
    calls: dict[int, ToolCall] = field(default_factory=dict[int, ToolCall])  # tool calls by their index in the response
    is_complete: bool = False  # True if the stream's last event has been received
    # number of completion tokens that the server reported with the last chunk, or None if the chunk had no count
    counted_tokens: int | None = None

    @property
    def text(self) -> str:
        """The text of the response."""
        return "".join(self.texts)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the response, in the order of their indexes."""
        return [self.calls[index] for index in sorted(self.calls)]

    def add_call(self, index: int, name: str, arguments: str) -> bool:
        """Append to the name and the arguments of the tool call with this index.

        Returns:
            True if `name` or `arguments` is not empty.
        """
        known = self.calls.get(index, ToolCall("", ""))
        self.calls[index] = ToolCall(known.name + name, known.arguments + arguments)
        return bool(name or arguments)


P99_MIN_SAMPLES = 100
"""Smallest number of values for a 99th percentile.

With fewer values, the percentile would always lie between the two largest values.
"""

MIN_DECODE_WINDOW_S = 0.2
"""Shortest decode time from which a decode rate is computed, in seconds.

The rate of a shorter decode would depend mainly on how the server groups tokens into chunks.
"""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary statistics of `n` numbers: mean, extremes and percentiles.

    Percentiles are interpolated linearly. `p99` is None for fewer than 100 numbers.
    """

    n: int
    mean: float
    min: float
    max: float
    p50: float
    p90: float
    p95: float
    p99: float | None


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service level objectives (SLO): upper limits for latencies in seconds.

    None disables a limit.

    A request counts as good if it meets all limits. The times to the first token (`ttft_s`) and to the last token
    (`e2e_s`) are measured from the request's scheduled time.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestMeasures:
    """The metrics of one request, which the module `metric_definitions` defines.

    A metric that cannot be computed is None.
    """

    ttft_s: float | None
    ttfo_s: float | None
    e2e_s: float | None
    tpot_s: float | None
    ntpot_s: float | None
    output_tps_user: float | None
    prefill_tps: float | None
    queue_s: float | None
    client_queue_s: float
    scheduled_ttft_s: float | None
    scheduled_e2e_s: float | None
    completion_tokens: int
    estimated: bool  # True if the number of tokens is the number of chunks, because the server did not report tokens
    # True if `prefill_tps` is based on the time to first token at the client, because the server did not report its
    # prefill time
    prefill_estimated: bool
    icl_s: list[float] = field(default_factory=list[float])
    itl_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class RunMeasures:
    """The metrics of one sample, which consists of one or more requests."""

    requests: int  # number of sent requests
    # number of requests with each status except `cancelled`
    completed: int
    rejected: int
    timed_out: int
    failed: int
    incomplete: int
    # summary statistics of each metric, computed from the requests with complete responses
    distributions: dict[str, Distribution]
    totals: dict[str, float]  # metrics of the whole sample: `output_tps`, `goodput_rps` and `goodput_share`
    estimated: bool  # True if the tokens of some requests were estimated from the number of chunks
    prefill_estimated: bool  # True if some prefill rates are based on the time to first token at the client


def distribution(values: Iterable[float]) -> Distribution | None:
    """Return summary statistics of `values`, or None if there are no values."""
    sample = np.asarray(list(values), dtype=np.float64)
    if not sample.size:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(sample, [50, 90, 95, 99]))
    return Distribution(
        n=sample.size,
        mean=float(sample.mean()),
        min=float(sample.min()),
        max=float(sample.max()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99 if sample.size >= P99_MIN_SAMPLES else None,
    )


def measure(record: RequestRecord) -> RequestMeasures:
    """Return the metrics of a request from its record.

    Requests that failed or were canceled also have metrics.
    """
    deltas, t0 = record.deltas, record.sent
    first = deltas[0].at if deltas else None
    last = deltas[-1].at if deltas else None
    visible = next((delta.at for delta in deltas if delta.kind != "reasoning"), None)
    reported = record.completion_tokens
    n = len(deltas) if reported is None else reported
    ttft, ttfo, e2e = _since(t0, first), _since(t0, visible), _since(t0, last)
    window = deltas[-1].at - deltas[0].at if len(deltas) > 1 else None
    streamed = n - _hidden_tokens(record)
    tpot = window / (streamed - 1) if window is not None and streamed >= 2 else None
    prefill_tps, prefill_estimated = _prefill_rate(record, ttft)
    return RequestMeasures(
        ttft_s=ttft,
        ttfo_s=ttfo,
        e2e_s=e2e,
        tpot_s=tpot,
        ntpot_s=e2e / n if e2e is not None and n else None,
        output_tps_user=1 / tpot if tpot and window is not None and window >= MIN_DECODE_WINDOW_S else None,
        prefill_tps=prefill_tps,
        queue_s=_queue(record, ttft),
        client_queue_s=t0 - record.scheduled,
        scheduled_ttft_s=_since(record.scheduled, first),
        scheduled_e2e_s=_since(record.scheduled, last),
        completion_tokens=n,
        estimated=reported is None and bool(deltas),
        prefill_estimated=prefill_estimated,
        icl_s=[current.at - previous.at for previous, current in pairwise(deltas)],
        itl_s=_token_gaps(record),
    )


def measure_run(records: Sequence[RequestRecord], objectives: Objectives | None = None) -> RunMeasures:
    """Return the metrics of a sample from the records of its requests.

    Latencies include only complete responses, but the throughput `output_tps` includes the tokens of all requests. A
    total that cannot be computed is missing in `totals`.

    Args:
        objectives: latency limits for goodput, or None if goodput is not computed.
    """
    measured = [(record, measure(record)) for record in records]
    done = [measures for record, measures in measured if record.status == "ok"]
    count = {status: sum(record.status == status for record in records) for status in _STATUSES}
    columns = {name: [v for m in done if (v := getattr(m, name)) is not None] for name in _PER_REQUEST}
    columns["icl_s"] = [gap for m in done for gap in m.icl_s]
    columns["itl_s"] = [gap for m in done for gap in m.itl_s]
    totals: dict[str, float] = {}
    duration = max((r.ended for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    if duration > 0:
        totals["output_tps"] = sum(m.completion_tokens for _, m in measured) / duration
    if objectives is not None and records:
        good = sum(record.status == "ok" and _is_good(m, objectives) for record, m in measured)
        totals["goodput_share"] = good / len(records)
        if duration > 0:
            totals["goodput_rps"] = good / duration
    return RunMeasures(
        requests=len(records),
        completed=count["ok"],
        rejected=count["rejected"],
        timed_out=count["timeout"],
        failed=count["error"],
        incomplete=count["incomplete"],
        distributions={name: summary for name, values in columns.items() if (summary := distribution(values))},
        totals=totals,
        estimated=any(m.estimated for _, m in measured),
        prefill_estimated=any(m.prefill_estimated for m in done),
    )


_STATUSES = ("ok", "rejected", "timeout", "error", "incomplete")
_PER_REQUEST = (
    "ttft_s",
    "ttfo_s",
    "e2e_s",
    "tpot_s",
    "ntpot_s",
    "output_tps_user",
    "prefill_tps",
    "queue_s",
    "client_queue_s",
    "scheduled_ttft_s",
    "scheduled_e2e_s",
)


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start


def _hidden_tokens(record: RequestRecord) -> int:
    """Return the number of reasoning tokens that the server counts but does not send."""
    shown = any(delta.kind == "reasoning" for delta in record.deltas)
    return 0 if shown else record.reasoning_tokens or 0


def _prefill_rate(record: RequestRecord, ttft: float | None) -> tuple[float | None, bool]:
    """Return the prefill rate in tokens per second, and whether it is estimated.

    The rate is the number of prompt tokens without cached tokens, divided by the prefill time that the server reports.
    If the server does not report its prefill time, `ttft` (time to first token) is used, and the rate counts as
    estimated. The rate is None if a number is unknown or all prompt tokens were cached.
    """
    if record.prompt_tokens is None:
        return None, False
    computed = record.prompt_tokens - (record.cached_tokens or 0)
    seconds = record.prefill_s or ttft
    if computed <= 0 or not seconds:
        return None, False
    return computed / seconds, not record.prefill_s


def _queue(record: RequestRecord, ttft: float | None) -> float | None:
    if record.queue_s is not None:
        return record.queue_s
    if ttft is None or record.prefill_s is None:
        return None
    return max(ttft - record.prefill_s, 0.0)


def _token_gaps(record: RequestRecord) -> list[float]:
    """Return the time between each token and the previous token.

    If a chunk has several tokens, the time since the previous chunk is divided evenly among them. The list is empty if
    the server does not report a token count with each chunk.
    """
    gaps: list[float] = []
    for previous, current in pairwise(record.deltas):
        if previous.tokens is None or current.tokens is None:
            return []
        tokens = current.tokens - previous.tokens
        if tokens > 0:
            gaps += [(current.at - previous.at) / tokens] * tokens
    return gaps


def _is_good(measures: RequestMeasures, objectives: Objectives) -> bool:
    """Return whether a request meets the latency limits."""
    # A request without any token fails the limits of TTFT and total time. A response of one token has no time per
    # output token, so it meets the limit of the time per output token.
    waits = ((measures.scheduled_ttft_s, objectives.ttft_s), (measures.scheduled_e2e_s, objectives.e2e_s))
    in_time = all(limit is None or (value is not None and value <= limit) for value, limit in waits)
    return in_time and (objectives.tpot_s is None or measures.tpot_s is None or measures.tpot_s <= objectives.tpot_s)
