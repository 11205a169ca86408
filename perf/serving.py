"""Measure a node over HTTP with one client, then with several concurrent clients, as JSON lines.

usage: python perf/serving.py [MODEL] [--streams 1,16] [--rounds 5] [--tokens 128]

MODEL is a value of `neuron --model`: an id, a package or a path. The node runs in its own process; the script is the
client. A row is a number of concurrent streams (`--streams`). Each round measures every row once, so that other
activity on the machine affects all rows. Answers are streamed, greedy, and exactly `--tokens` tokens long. All prompts
differ.

There is one line per row with medians over the rounds:

    tok_s       tokens of all streams per second, from the first request to the last token
    ttft_ms     time to a stream's first token
    tpot_ms     time between two later tokens of a stream
    runs        `tok_s` of each round

The last line, `ratio`, is `tok_s` of the last row divided by `tok_s` of the first row.
"""

import argparse
from statistics import median

from support.output import print_line, run
from support.servers import Row, client_session, node, stream_concurrently


async def measure(model: str, rows: list[int], rounds: int, tokens: int) -> None:
    """Measure every number of streams in `rows` once per round, then print the medians over the rounds."""
    runs: dict[int, list[Row]] = {streams: [] for streams in rows}
    async with client_session() as session, node(model, session) as (_, url, served):
        for streams in rows:
            await stream_concurrently(session, url, served, streams, 8)  # warm up
        for _ in range(rounds):
            for streams in rows:
                runs[streams].append(await stream_concurrently(session, url, served, streams, tokens))
    for streams, row_runs in runs.items():
        print_line(
            row=f"stream@{streams}",
            tok_s=median(row.tok_s for row in row_runs),
            ttft_ms=median(row.ttft_ms for row in row_runs),
            tpot_ms=median(row.tpot_ms for row in row_runs),
            runs=[row.tok_s for row in row_runs],
        )
    first_row, last_row = runs[rows[0]], runs[rows[-1]]
    print_line(row="ratio", value=median(b.tok_s / a.tok_s for a, b in zip(first_row, last_row, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    rows = [int(streams) for streams in arguments.streams.split(",")]
    run(measure(arguments.model, rows, arguments.rounds, arguments.tokens))


if __name__ == "__main__":
    main()
