"""Names, units and definitions of all metrics.

The definitions use the following terms. Times are seconds on the client's monotonic clock. t0 is the time just before a
request is sent. c1 to ck are the chunks with text, reasoning or tool calls, and t(c1) is the arrival time of c1. n is
the number of completion tokens. m is the number of tokens that the client receives: n minus the number of reasoning
tokens that the server does not send.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric.

    Attributes:
        name: name. If the database table `run` has a column for the metric, the column has the same name.
        title: display name.
        unit: `s`, `tok/s`, `1/s`, `tokens`, or empty for a share from 0 to 1.
        better: whether lower or higher values are better.
        definition: one sentence for the web page "Method", the API and the documentation.
    """

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"]
    definition: str


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("ttft_s", "TTFT", "s", "lower", "Time to first token: t(c1) - t0."),
        Metric(
            "ttfo_s",
            "TTFO",
            "s",
            "lower",
            "Time to first output: from t0 to the first chunk that is not reasoning.",
        ),
        Metric(
            "tpot_s",
            "TPOT",
            "s",
            "lower",
            "Time per output token: (e2e - ttft) / (m - 1), where m is the number of streamed tokens: n without hidden "
            "reasoning. Needs two chunks and m of 2 or more.",
        ),
        Metric(
            "ntpot_s",
            "NTPOT",
            "s",
            "lower",
            "Normalized time per output token: e2e / n, including the time to the first token.",
        ),
        Metric(
            "icl_s",
            "ICL",
            "s",
            "lower",
            "Inter-chunk latency: time between two chunks. A chunk may hold several tokens.",
        ),
        Metric(
            "itl_s",
            "ITL",
            "s",
            "lower",
            "Inter-token latency: time between two tokens. Exists only if the server reports token counts with each "
            "chunk.",
        ),
        Metric("e2e_s", "E2E", "s", "lower", "Time to the last token: t(ck) - t0."),
        Metric(
            "output_tps_user",
            "Decode rate",
            "tok/s",
            "higher",
            "Output tokens per second of one request: 1 / tpot. Needs at least 200 ms between the first and the last "
            "chunk.",
        ),
        Metric(
            "output_tps",
            "Throughput",
            "tok/s",
            "higher",
            "Output tokens per second of all requests together: sum of n, divided by (last end - first start).",
        ),
        Metric(
            "prefill_tps",
            "Prefill rate",
            "tok/s",
            "higher",
            "Prompt tokens that were not cached, divided by the prefill time that the server reports. If it reports "
            "none, divided by ttft, and marked as estimated.",
        ),
        Metric(
            "queue_s",
            "Queue",
            "s",
            "lower",
            "Time in the server's queue, as the server reports it; otherwise ttft - prefill time.",
        ),
        Metric(
            "client_queue_s",
            "Client queue",
            "s",
            "lower",
            "Delay of the request at the client: t0 - scheduled time.",
        ),
        Metric(
            "scheduled_ttft_s",
            "TTFT from schedule",
            "s",
            "lower",
            "TTFT from the scheduled time of the request instead of t0: t(c1) - scheduled time.",
        ),
        Metric(
            "scheduled_e2e_s",
            "E2E from schedule",
            "s",
            "lower",
            "E2E from the scheduled time of the request instead of t0: t(ck) - scheduled time.",
        ),
        Metric(
            "goodput_rps",
            "Goodput",
            "1/s",
            "higher",
            "Requests that met all latency objectives, divided by (last end - first start).",
        ),
        Metric(
            "goodput_share",
            "Goodput share",
            "",
            "higher",
            "Share of all sent requests that met all latency objectives. Failed and rejected requests did not.",
        ),
        Metric("load_s", "Load", "s", "lower", "Time to load a model, from the request to the response."),
        Metric("unload_s", "Unload", "s", "lower", "Time to unload a model, from the request to the response."),
        Metric(
            "release_s",
            "Release",
            "s",
            "lower",
            "Time from the client's disconnect until the server no longer counts the request as running.",
        ),
        Metric("score", "Score", "", "higher", "Share of the checks that the answers passed."),
    )
}
