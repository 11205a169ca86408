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
            "Normalised time per output token: e2e / n.",
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
            "Inter-token latency: the same for each token, only where the server counts tokens with each chunk.",
        ),
        Metric("e2e_s", "E2E", "s", "lower", "Time to the last token: t(ck) - t0."),
        Metric(
            "output_tps_user",
            "Decode rate",
            "tok/s",
            "higher",
            "Tokens per second that one user sees: 1 / tpot; needs 200 ms or more from the first chunk to the last.",
        ),
        Metric(
            "output_tps",
            "Throughput",
            "tok/s",
            "higher",
            "Tokens per second of the whole system: sum of n over all requests, divided by last end - first start.",
        ),
        Metric(
            "prefill_tps",
            "Prefill rate",
            "tok/s",
            "higher",
            "Prompt tokens that were not cached, per second of the server's prefill; where it does not say how long "
            "that took, per second of ttft (flagged as estimated).",
        ),
        Metric(
            "queue_s",
            "Queue",
            "s",
            "lower",
            "Time waited at the server: as it says, else ttft - prefill.",
        ),
        Metric(
            "client_queue_s",
            "Client queue",
            "s",
            "lower",
            "How late the client sent what was scheduled: t0 - scheduled.",
        ),
        Metric(
            "scheduled_ttft_s",
            "TTFT from schedule",
            "s",
            "lower",
            "t(c1) - scheduled: what a user of an open loop waits, however late the client was.",
        ),
        Metric("scheduled_e2e_s", "E2E from schedule", "s", "lower", "t(ck) - scheduled."),
        Metric(
            "goodput_rps",
            "Goodput",
            "1/s",
            "higher",
            "Requests that met every objective, divided by last end - first start.",
        ),
        Metric(
            "goodput_share",
            "Goodput share",
            "",
            "higher",
            "The same as a share of all requests that were issued; errors and refusals count as bad.",
        ),
        Metric("load_s", "Load", "s", "lower", "Time from the order to load a model until it was loaded."),
        Metric("unload_s", "Unload", "s", "lower", "Time from the order to unload a model until it was gone."),
        Metric(
            "release_s",
            "Release",
            "s",
            "lower",
            "Time from the client's hanging up until the server counted the request no longer.",
        ),
        Metric("score", "Score", "", "higher", "Share of the checks of an answer that it passed."),
    )
}
