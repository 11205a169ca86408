"""Check that helexa-bench and guidellm measure the same latencies on the same server under the same load.

usage: python perf/bench_agreement.py ENDPOINT MODEL --guidellm DIR [--concurrency 2] [--requests 24] [--turns 3]
           [--prompt-tokens 128] [--max-tokens 64] [--out snapshot.json]

guidellm is a load generator of the vLLM project. In every turn, helexa-bench and guidellm run one after the other, so
that other activity on the machine affects both. Each tool keeps `--concurrency` requests in flight until all responses
are complete. Both use prompts of the same words, and no prompt is sent twice. guidellm runs in a virtual environment in
DIR, which the script creates if it is missing. This environment also uses the packages (such as torch) of the
interpreter that runs the script.

The script computes the results of both tools from their timestamps, with the definitions of helexa-bench:

    ttft_s          seconds from the request to the first token
    tpot_s          (time of the last token - time of the first token) / (number of tokens - 1)
    output_tps      tokens of all responses of a turn / (end of the last response - start of the first request)

The script prints medians over the requests of all turns and their ratios. The exit status is 1 if a ratio differs from
1 by more than 5 %.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.machine import commit, machine

from helexa.bench.client import Client, open_session
from helexa.bench.prompts_and_load_generators import Clock, PromptRequest, Prompts, Turn
from helexa.bench.request_records_and_metrics import RequestRecord, measure, measure_run
from helexa.bench.wire_formats import api_format_of

GUIDELLM = "guidellm==0.8.1"
TOLERANCE = 0.05
MEASURES = ("ttft_s", "tpot_s", "output_tps")


@dataclass(frozen=True)
class Load:
    """The number and size of the requests that each tool sends to a server in one turn."""

    endpoint: str
    model: str
    concurrency: int
    requests: int
    prompt_tokens: int
    max_tokens: int

    def prompts(self) -> list[str]:
        """Return new random prompts, one for each request of a turn."""
        source = Prompts(0, secrets.token_hex(8))
        return [source.cold(self.prompt_tokens)[0].text for _ in range(self.requests)]


@dataclass(frozen=True)
class TurnResults:
    """The results of one tool in one turn: TTFT and TPOT of each request in seconds, and all tokens per second."""

    ttft_s: list[float]
    tpot_s: list[float]
    output_tps: float


async def run_helexa_bench(load: Load) -> TurnResults:
    """Send the requests of one turn with helexa-bench's client and return the results."""
    prompts = iter([PromptRequest(load.model, [Turn("user", p)], load.max_tokens, True) for p in load.prompts()])
    async with open_session() as session:
        client = Client(session, load.endpoint, api_format_of("openai"), Clock(), ignore_eos=True)

        async def user() -> list[RequestRecord]:
            return [await client.ask(prompt) for prompt in prompts]

        records = [item for each in await asyncio.gather(*(user() for _ in range(load.concurrency))) for item in each]
    failed = [record for record in records if record.status != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} requests of helexa-bench failed; the first: {failed[0].error}")
    measures = [measure(record) for record in records]
    return TurnResults(
        [item.ttft_s for item in measures if item.ttft_s is not None],
        [item.tpot_s for item in measures if item.tpot_s is not None],
        measure_run(records).totals["output_tps"],
    )


def run_guidellm(load: Load, program: Path, folder: Path) -> TurnResults:
    """Send the requests of one turn with guidellm and return the results.

    Args:
        load: the number and size of the requests.
        program: path of guidellm's program.
        folder: folder for guidellm's input and output files.
    """
    data, report = folder / "prompts.jsonl", folder / "report.json"
    lines = [json.dumps({"prompt": text, "output_tokens_count": load.max_tokens}) for text in load.prompts()]
    data.write_text("\n".join(lines))
    backend = {"kind": "openai_http", "target": load.endpoint, "model": load.model}
    command = [
        *(str(program), "run", "--disable-console"),
        *("--backend", json.dumps(backend | {"extras": {"body": {"temperature": 1, "top_p": 1}}})),
        *("--profile", f"kind=concurrent,streams={load.concurrency}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--data", f"kind=json_file,path={data}"),
        *("--output", f"kind=json,path={report}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"guidellm failed:\n{done.stderr[-2000:]}")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    rows = benchmark["requests"]["successful"]
    if len(rows) != load.requests:
        raise SystemExit(f"guidellm completed {len(rows)} of {load.requests} requests")
    times = [row["info"]["timings"] for row in rows]
    tokens = [row["output_metrics"]["text_tokens"] for row in rows]
    duration = max(time["request_end"] for time in times) - min(time["request_start"] for time in times)
    return TurnResults(
        [time["first_token_iteration"] - time["request_start"] for time in times],
        [
            (time["last_token_iteration"] - time["first_token_iteration"]) / (n - 1)
            for time, n in zip(times, tokens, strict=True)
        ],
        sum(tokens) / duration,
    )


def installed(folder: Path) -> Path:
    """Install guidellm in a virtual environment in `folder` if it is missing. Return the path of its program."""
    program = folder / "bin" / "guidellm"
    if not program.exists():
        print(f"installing {GUIDELLM} into {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", GUIDELLM]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    return program


def medians(turns: Sequence[TurnResults]) -> dict[str, float]:
    """Return the medians of TTFT and TPOT over the requests of all turns, and the median throughput over the turns."""
    return {
        "ttft_s": statistics.median(value for turn in turns for value in turn.ttft_s),
        "tpot_s": statistics.median(value for turn in turns for value in turn.tpot_s),
        "output_tps": statistics.median(turn.output_tps for turn in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("model")
    parser.add_argument("--guidellm", type=Path, required=True, metavar="DIR")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    load = Load(
        wanted.endpoint.rstrip("/"),
        wanted.model,
        wanted.concurrency,
        wanted.requests,
        wanted.prompt_tokens,
        wanted.max_tokens,
    )
    program = installed(wanted.guidellm.absolute())
    asyncio.run(run_helexa_bench(load))  # warm up
    turns: dict[str, list[TurnResults]] = {"helexa-bench": [], "guidellm": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(wanted.turns):
            turns["helexa-bench"].append(asyncio.run(run_helexa_bench(load)))
            turns["guidellm"].append(run_guidellm(load, program, Path(folder)))
            print(f"turn {number + 1} of {wanted.turns}", file=sys.stderr, flush=True)
    tool_medians = {tool: medians(results) for tool, results in turns.items()}
    ratios = {name: tool_medians["helexa-bench"][name] / tool_medians["guidellm"][name] for name in MEASURES}
    print(f"{'':12}{'helexa-bench':>14}{'guidellm':>12}{'ratio':>8}")
    for name in MEASURES:
        print(
            f"{name:12}{tool_medians['helexa-bench'][name]:14.4f}{tool_medians['guidellm'][name]:12.4f}{ratios[name]:8.3f}"
        )
    if wanted.out:
        snapshot: dict[str, Any] = {
            "load": load.__dict__ | {"turns": wanted.turns},
            "tools": {"guidellm": GUIDELLM, "helexa": commit()},
            "machine": machine(),
            "medians": tool_medians,
            "ratios": ratios,
            "turns": {tool: [turn.__dict__ for turn in results] for tool, results in turns.items()},
        }
        wanted.out.write_text(json.dumps(snapshot, indent=1))
    worst = max(abs(ratio - 1) for ratio in ratios.values())
    if worst > TOLERANCE:
        raise SystemExit(f"they differ by {worst:.1%}; is the machine quiet?")


if __name__ == "__main__":
    main()
