"""Stress a node with streamed, aborted and oversized requests, with loads of a second model, and with faults.

usage: python perf/soak.py [MINUTES] [--model MODEL] [--clients 24] [--seed 1] [--out soak.json]

The node runs in its own process. Once per minute, the script loads and unloads a second model and injects a fault into
the engine. All requests are greedy. Before the test, the script generates the expected answer of each request, one at a
time. It prints a line per minute, and the measurements as JSON at the end. The exit code is 1 if one of these checks
failed:

    answers     every complete answer equals the expected answer, byte for byte
    errors      every other request got an error in the API's format
    back        after each fault, a request is answered within 10 seconds
    leaks       memory written by all processes during the last eight faults is at most 5 % more than during the first
                eight faults after 5 minutes (this check needs 22 minutes); the numbers of open files and processes do
                not grow; at the end, all queues are empty and all KV pages are free
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
from support.local_model import local_path
from support.machine import machine
from support.soak_node import FAULTS, SoakNode

BACK_SECONDS = 10.0
MEMORY_TOLERANCE = 0.05
FAULT_SECONDS = 60.0
BASELINE_MINUTE = 5
SECOND = "soak/second"
CONTRACT = frozenset({400, 404, 413, 422, 429, 500, 503})
RETRYABLE = frozenset({429, 503})
TOPICS = ("the sea", "a long winter", "how bread is made", "the first railway", "two brothers", "why the sky is blue")


@dataclass
class Counters:
    """Counts the requests of the test by outcome."""

    answers: int = 0
    hang_ups: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    improper: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Recovery:
    """An injected fault, and the seconds until a request succeeded again."""

    minute: float
    fault: str
    seconds: float


@dataclass(frozen=True)
class Sample:
    """Memory, open files and number of processes of the idle node, measured once between two faults."""

    minute: float
    server_mb: float
    total_mb: float
    files: int
    processes: int


@dataclass(frozen=True)
class Prompt:
    prompt: str
    max_tokens: int

    def body(self, model: str, **fields: Any) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        } | fields


def random_prompts(chance: random.Random, count: int) -> list[Prompt]:
    """Return `count` random prompts of different lengths. Some of the prompts share a prefix."""
    prompt_list = []
    for number in range(count):
        topic = chance.choice(TOPICS)
        begin = f"A story about {topic}, which is told often. " * chance.choice((1, 1, 2, 8))
        prompt_list.append(Prompt(f"{begin}Once upon a time, number {number},", chance.choice((1, 8, 24, 48))))
    return prompt_list


class Soak:
    """One soak test of a node: its clients, loads of the second model, and faults."""

    def __init__(self, node: SoakNode, session: aiohttp.ClientSession, arguments: argparse.Namespace) -> None:
        self.counters = Counters()
        self.recoveries: list[Recovery] = []
        self.samples: list[Sample] = []
        self._node = node
        self._session = session
        self._seconds = arguments.minutes * 60
        self._clients = arguments.clients
        self._seed = arguments.seed
        self._prompts = random_prompts(random.Random(arguments.seed), 40)
        self._references: dict[Prompt, str] = {}
        self._begin = 0.0

    async def run(self) -> None:
        """Run the whole test and wait until the node is idle."""
        for prompt in self._prompts:
            status, body = await self._complete(prompt.body(self._node.model))
            assert status == 200, body
            self._references[prompt] = body["choices"][0]["text"]
        self.counters = Counters()
        self._begin = time.monotonic()
        clients = [self._client(random.Random(f"{self._seed}.{number}")) for number in range(self._clients)]
        await asyncio.gather(*clients, self._minutes())
        await self._until_answered()
        await self._until_idle()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._begin

    async def _client(self, chance: random.Random) -> None:
        acts = (self._ask, self._stream, self._hang_up, self._ask_too_much)
        while self._elapsed < self._seconds:
            model = SECOND if chance.random() < 0.1 else self._node.model
            (act,) = chance.choices(acts, weights=(50, 30, 15, 5))
            try:
                refused = await act(chance, model)
            except aiohttp.ClientError as error:
                self.counters.improper.append(f"{act.__name__}: {type(error).__name__}: {error}")
                refused = True
            if refused:  # wait after a rejection, as a client does, but shorter than Retry-After says
                await asyncio.sleep(0.2 + 0.3 * chance.random())

    async def _ask(self, chance: random.Random, model: str) -> bool:
        prompt = chance.choice(self._prompts)
        status, body = await self._complete(prompt.body(model))
        if status == 200:
            self._compare(prompt, body["choices"][0]["text"])
        return status != 200

    async def _stream(self, chance: random.Random, model: str) -> bool:
        prompt = chance.choice(self._prompts)
        async with self._post(prompt.body(model, stream=True)) as response:
            if response.status != 200:
                self._error_response(response, await response.read())
                return True
            events = (await response.read()).decode().split("\n\n")
        lines = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        if lines[-1:] != ["[DONE]"]:
            self.counters.improper.append(f"a stream without its end: {lines[-2:]}")
        elif "error" in chunks[-1]:
            self._error("stream", chunks[-1])
        else:
            self._compare(prompt, "".join(c["choices"][0]["text"] for c in chunks if c["choices"]))
            return False
        return True

    async def _hang_up(self, chance: random.Random, model: str) -> bool:
        prompt = Prompt(chance.choice(self._prompts).prompt, 400)
        async with self._post(prompt.body(model, stream=True)) as response:
            if response.status != 200:
                self._error_response(response, await response.read())
                return True
            for _ in range(chance.randrange(5)):
                await response.content.readline()
            response.close()
        self.counters.hang_ups += 1
        return False

    async def _ask_too_much(self, chance: random.Random, model: str) -> bool:
        status, body = await self._complete(Prompt("word " * 20_000, 1).body(model))
        if status == 200 or (status == 400 and body["error"]["code"] != "context_length_exceeded"):
            self.counters.improper.append(f"a prompt that is too long: {status} {body}")
        return True

    async def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._post(body) as response:
            if response.status != 200:
                self._error_response(response, await response.read())
            return response.status, await response.json()

    def _post(self, body: dict[str, Any]) -> Any:
        return self._session.post(f"{self._node.url}/v1/completions", json=body)

    def _compare(self, prompt: Prompt, text: str) -> None:
        self.counters.answers += 1
        if text != self._references[prompt]:
            self.counters.wrong.append(f"{prompt}: {text!r} instead of {self._references[prompt]!r}")

    def _error_response(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        status = response.status
        if status not in CONTRACT or (status in RETRYABLE and not response.headers.get("retry-after", "").isdecimal()):
            self.counters.improper.append(f"{status} {dict(response.headers)} {content[:300]!r}")
            return
        try:
            self._error(str(status), json.loads(content))
        except ValueError:
            self.counters.improper.append(f"{status} {content[:300]!r}")

    def _error(self, where: str, body: Any) -> None:
        error = body.get("error")
        if not isinstance(error, dict) or not {"message", "type", "code", "param"} <= error.keys():
            self.counters.improper.append(f"{where}: {body}")
        else:
            self.counters.refused[f"{where} {error['code'] or error['type']}"] += 1

    async def _minutes(self) -> None:
        """Load and unload the second model, measure the node's resources, and inject a fault, once per minute."""
        print(f"{'min':>5} {'answers':>8} {'hung up':>8} {'refused':>8} {'wrong':>6} {'back s':>7} {'MiB':>7} fault")
        faults = iter(FAULTS * 1000)
        spacing = min(FAULT_SECONDS, self._seconds / 3)
        while self._elapsed + spacing <= self._seconds + 1:
            begun = self._elapsed
            await self._second_model(spacing)
            await asyncio.sleep(max(0.0, begun + 0.75 * spacing - self._elapsed))
            sample = self._sample()
            fault = next(faults)
            seconds = await self._fault(fault)
            self.recoveries.append(Recovery(round(self._elapsed / 60, 2), fault, round(seconds, 2)))
            counters = self.counters
            print(
                f"{self._elapsed / 60:5.1f} {counters.answers:8} {counters.hang_ups:8} {counters.refused.total():8} "
                f"{len(counters.wrong):6} {seconds:7.1f} {sample.total_mb:7.0f} {fault}",
                flush=True,
            )
            await asyncio.sleep(max(0.0, begun + spacing - self._elapsed))

    async def _second_model(self, spacing: float) -> None:
        for action, pause in (("load", 0.25 * spacing), ("unload", 0.0)):
            body = {"model_id": SECOND, "source": f"file:{self._node.path}"}
            async with self._session.post(f"{self._node.url}/models/{action}", json=body) as response:
                content = await response.read()
                if response.status != 200 and "error" not in json.loads(content):
                    self.counters.improper.append(f"{action}: {response.status} {content[:300]!r}")
            await asyncio.sleep(pause)

    async def _fault(self, fault: str) -> float:
        """Inject the fault `fault` into the engine. Return the seconds until a later request succeeds."""
        await self._node.strike(fault)
        return await self._until_answered()

    async def _until_answered(self) -> float:
        begun = time.monotonic()
        while time.monotonic() - begun < 60:
            with suppress(aiohttp.ClientError):
                status, _ = await self._complete(Prompt("Hello", 1).body(self._node.model))
                if status == 200:
                    return time.monotonic() - begun
            await asyncio.sleep(0.05)
        return float("inf")

    def _sample(self) -> Sample:
        sample = Sample(round(self._elapsed / 60, 2), *self._node.figures())
        self.samples.append(sample)
        return sample

    async def _until_idle(self) -> None:
        """Wait until the node has no requests and all KV pages are free, at most one minute.

        After one minute, requests or KV pages that are still in use count as a failed check.
        """
        load: dict[str, Any] = {}
        for _ in range(600):
            async with self._session.get(f"{self._node.url}/health") as response:
                (load,) = (await response.json())["models"]
            idle = load["kv_pages_free"] == load["kv_pages_total"] > 0
            if idle and load["in_flight"] == load["queue_depth"] == 0:
                return
            await asyncio.sleep(0.1)
        self.counters.improper.append(f"the node is not idle: {load}")


def failures(soak: Soak, minutes: float) -> list[str]:
    """Return a description of each check that the test failed."""
    counters, failed_checks = soak.counters, []
    if counters.wrong:
        failed_checks.append(f"{len(counters.wrong)} answers are wrong, such as {counters.wrong[0]}")
    if counters.improper:
        failed_checks.append(f"{len(counters.improper)} errors are none of the API's, such as {counters.improper[0]}")
    if not counters.answers:
        failed_checks.append("nothing was answered")
    failed_checks += [
        f"after '{entry.fault}' it took {entry.seconds:.1f} s"
        for entry in soak.recoveries
        if entry.seconds > BACK_SECONDS
    ]
    first = BASELINE_MINUTE if minutes >= 3 * BASELINE_MINUTE else minutes / 3
    settled = [sample for sample in soak.samples if sample.minute >= first - 0.5]
    if settled:
        last = settled[-1]
        for name in ("files", "processes"):
            limit = max(getattr(sample, name) for sample in settled[: -(-len(settled) // 2)])
            if getattr(last, name) > limit:
                failed_checks.append(f"{name} grew from {limit} to {getattr(last, name)}")
    # Engine memory grows for a while after the start and depends on the kind of the last fault. The check therefore
    # starts at a later minute and compares means over all kinds of faults.
    if len(settled) >= 2 * len(FAULTS):
        was, now = (
            fmean(sample.total_mb for sample in round_samples)
            for round_samples in (settled[: len(FAULTS)], settled[-len(FAULTS) :])
        )
        if now > was * (1 + MEMORY_TOLERANCE):
            failed_checks.append(f"memory grew from {was:.0f} to {now:.0f} MiB")
    return failed_checks


async def soak(path: Path, arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder, SoakNode(path, Path(folder)) as node:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await node.ready(session)
            run = Soak(node, session, arguments)
            await run.run()
        code = await asyncio.to_thread(node.end)
    failed_checks = failures(run, arguments.minutes)
    if code:
        failed_checks.append(f"the node ended with {code}")
    figures = {
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "answers": run.counters.answers,
        "hang_ups": run.counters.hang_ups,
        "refused": dict(run.counters.refused.most_common()),
        "recoveries": [asdict(entry) for entry in run.recoveries],
        "samples": [asdict(entry) for entry in run.samples],
        "failures": failed_checks,
        "machine": machine(),
    }
    print(json.dumps(figures))
    if arguments.out:
        await asyncio.to_thread(arguments.out.write_text, json.dumps(figures, indent=1))
    print("\n".join(failed_checks) or "sound", file=sys.stderr)
    return 1 if failed_checks else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", nargs="?", type=float, default=30.0)
    parser.add_argument("--model", default="helexa/small")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    raise SystemExit(asyncio.run(soak(local_path(arguments.model), arguments)))


if __name__ == "__main__":
    main()
