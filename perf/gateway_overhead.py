"""Measure the latency that a gateway adds to a direct request to a node, as JSON lines.

usage: python perf/gateway_overhead.py [MODEL] [--requests 200] [--tokens 1]

A node and a gateway in front of the node run in separate processes. The script is the client: it sends each short
prompt once directly to the node and once to the gateway. The order of the two requests alternates.

There is one line for the direct route and one for the route through the gateway. Each line has the median and the 90th
percentile of the milliseconds to the first token (`ttft_ms`) and to the end of the answer (`total_ms`). The last line,
`overhead`, has the medians of the differences between the two requests with the same prompt.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median, quantiles

from support.gateways import cortex_config, gateway_serves
from support.output import print_line, run
from support.servers import StreamTiming, client_session, free_port, node, server, stream_completion

PROMPT = "The capital of France is"
WARM_UP = 10


async def measure(model: str, requests: int, tokens: int) -> None:
    """Send each request directly to the node and through the gateway, then print the results."""
    port = free_port()
    routes: dict[str, list[StreamTiming]] = {"direct": [], "gateway": []}
    with tempfile.TemporaryDirectory() as folder:
        async with client_session() as session, node(model, session) as (_, node_url, served):
            config = cortex_config(Path(folder), port, node_url)
            urls = {"direct": node_url, "gateway": f"http://127.0.0.1:{port}"}
            with server("helexa.cortex", "serve", "-c", str(config)):
                await gateway_serves(session, urls["gateway"], served)
                for number in range(WARM_UP + requests):
                    for route in list(routes)[:: 1 if number % 2 else -1]:
                        timing = await stream_completion(session, urls[route], served, PROMPT, tokens)
                        if number >= WARM_UP:
                            routes[route].append(timing)
    for route, timings in routes.items():
        first, total = first_ms(timings), total_ms(timings)
        print_line(
            row=route,
            ttft_ms=median(first),
            ttft_p90_ms=quantiles(first, n=10)[-1],
            total_ms=median(total),
            total_p90_ms=quantiles(total, n=10)[-1],
        )
    print_line(
        row="overhead",
        ttft_ms=median_difference(first_ms(routes["gateway"]), first_ms(routes["direct"])),
        total_ms=median_difference(total_ms(routes["gateway"]), total_ms(routes["direct"])),
        requests=requests,
        tokens=tokens,
    )


def first_ms(timings: list[StreamTiming]) -> list[float]:
    """Return the time to the first token of each response, in milliseconds."""
    return [1000 * (timing.first - timing.requested) for timing in timings]


def total_ms(timings: list[StreamTiming]) -> list[float]:
    """Return the time to the end of each response, in milliseconds."""
    return [1000 * (timing.last - timing.requested) for timing in timings]


def median_difference(longer: list[float], shorter: list[float]) -> float:
    """Return the median of the differences `longer[i] - shorter[i]`."""
    return median(a - b for a, b in zip(longer, shorter, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1)
    arguments = parser.parse_args()
    run(measure(arguments.model, arguments.requests, arguments.tokens))


if __name__ == "__main__":
    main()
