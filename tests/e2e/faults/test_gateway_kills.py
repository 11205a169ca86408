"""Gateways killed at random times under load: no budget is exceeded, and every complete response is in the ledger.

`HELEXA_KILLS` sets the number of kills.
"""

import asyncio
import json
import random
import re
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cortex import fake_node
from cortex.cortex_process import COMMAND
from cortex.fake_node import FakeNode
from cortex.postgres import Postgres, running_postgres
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Database
from nightly import cases

KILLS = cases(2, 20, "HELEXA_KILLS")
AT_ONCE = 200
CAP = 50_000 * KILLS
MAX_TOKENS = 40
CAPPED = {"authorization": "Bearer capped"}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


class Counting:
    """A node handler that reports random token counts and records them by request id."""

    def __init__(self, seed: int) -> None:
        self.tokens: dict[str, int] = {}
        self._random = random.Random(seed)

    async def __call__(self, node: FakeNode, request: web.Request) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"count": 20, "max_model_len": 4096, "tokens": []})
        prompt, completion = self._random.randint(1, 20), self._random.randint(1, MAX_TOKENS)
        self.tokens[request.headers["x-request-id"]] = prompt + completion
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        await asyncio.sleep(self._random.random() * 0.05)
        if not (await request.json()).get("stream"):
            body = {"id": "c", "object": "chat.completion", "choices": [fake_node.CHOICE], "usage": usage}
            return web.json_response(body)
        response = await fake_node.begin(request, fake_node.ROLE, fake_node.chunk("a"))
        await asyncio.sleep(self._random.random() * 0.02)
        await response.write(fake_node.event(usage=usage) + fake_node.DONE)
        return response


class Gateway:
    """A gateway process that can be killed and started again on the same port."""

    def __init__(self, folder: Path, number: int, node: FakeNode, ledger: str) -> None:
        self._config = folder / f"cortex{number}.toml"
        self._node, self._ledger = node, ledger
        self._process: Process | None = None
        self.url = ""

    async def start(self) -> None:
        listen = self.url.removeprefix("http://") or "127.0.0.1:0"
        self._config.write_text(
            f'models_config = "none.toml"\n[gateway]\nlisten = "{listen}"\nmetrics_listen = "127.0.0.1:0"\n'
            f'poll_interval_secs = 0.2\n[ledger]\nurl = "{self._ledger}"\n'
            f'[[neurons]]\nname = "n1"\nendpoint = "{self._node.url}"\n'
            f'[[entitlements.keys]]\nkey = "capped"\naccount_id = "acme"\nhard_cap = {CAP}\n'
        )
        command = [*COMMAND, "serve", "-c", str(self._config)]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stderr=PIPE)
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            if match := re.search(r"listening url=(http://\S+) metrics_url=", line.decode()):
                self.url = match[1]
                self._drained = asyncio.create_task(_drain(self._process.stderr))
                return
        raise AssertionError("a gateway did not start")

    async def kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._drained

    async def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        assert await self._process.wait() == 0
        await self._drained


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


class Load:
    """Clients that send requests until `stop` is set, and the ids of requests with a complete response."""

    def __init__(self, gateways: list[Gateway]) -> None:
        self.finished: set[str] = set()
        self.refused = 0
        self.broken = 0
        self.stop = asyncio.Event()
        self._gateways = gateways
        self._serial = 0

    def answered(self) -> int:
        """Return the number of requests with a complete response or a rejection."""
        return len(self.finished) + self.refused

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(AT_ONCE)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self.stop.is_set():
            self._serial += 1
            name, stream = f"r{self._serial}", bool(self._serial % 2)
            url = self._gateways[self._serial % len(self._gateways)].url
            body = {"model": "Org/M", "messages": [], "max_tokens": MAX_TOKENS, "stream": stream}
            try:
                async with session.post(
                    f"{url}/v1/chat/completions", json=body, headers=CAPPED | {"x-request-id": name}
                ) as response:
                    content = await response.read()
            except aiohttp.ClientError:
                self.broken += 1
                await asyncio.sleep(0.1)
                continue
            complete = not stream or (content.endswith(fake_node.DONE) and b'"error"' not in content)
            if response.status == 200 and complete:
                self.finished.add(name)
            elif response.status == 429:
                assert json.loads(content)["error"]["code"] == "insufficient_quota"
                self.refused += 1
                await asyncio.sleep(0.05)
            else:
                await asyncio.sleep(0.1)


async def spent(database: Database) -> int:
    """Return the tokens of the budget that are spent or leased, according to the ledger."""
    rows = await database.fetch(
        "SELECT (SELECT COALESCE(SUM(spent), 0) FROM windows) "
        "+ (SELECT COALESCE(SUM(CASE WHEN granted > spent THEN granted ELSE spent END), 0) FROM leases) AS tokens"
    )
    return int(rows[0]["tokens"])


@pytest.mark.parametrize("gateways", [pytest.param(1, marks=pytest.mark.nightly), 3])
async def test_ledger_charges_each_request_exactly_after_gateways_were_killed(
    gateways: int, tmp_path: Path, postgres: Postgres
) -> None:
    chance, counting = random.Random(7), Counting(8)
    ledger = postgres.new_database() if gateways > 1 else f"sqlite:{tmp_path}/cortex.db"
    async with FakeNode().holds("Org/M").serving() as node:
        node.speak = counting
        running = [Gateway(tmp_path, number, node, ledger) for number in range(gateways)]
        for gateway in running:
            await gateway.start()
        database = await open_database(ledger)
        load = Load(running)
        requests = asyncio.create_task(load.run())
        try:
            for _ in range(KILLS):
                await asyncio.sleep(chance.random() * 0.6)
                assert await spent(database) <= CAP
                victim = chance.choice(running)
                await victim.kill()
                await victim.start()
            answered = load.answered()
            async with asyncio.timeout(60):
                while load.answered() < answered + AT_ONCE:  # noqa: ASYNC110 -- also the gateway killed last answers again
                    await asyncio.sleep(0.05)
        finally:
            load.stop.set()
            await requests
            for gateway in running:
                await gateway.stop()
        assert await spent(database) <= CAP
        entries = await database.fetch("SELECT request_id, state, charged, estimated FROM entries")
        await database.close()
    settled: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        settled.setdefault(entry["request_id"], []).append(dict(entry))
    assert load.finished
    for name in load.finished:
        exact = [entry["charged"] for entry in settled[name] if entry["state"] == "settled" and not entry["estimated"]]
        assert exact == [counting.tokens[name]], name
    assert sum(entry["charged"] for entry in entries) <= CAP
    summary = f"{len(load.finished)} finished, {load.refused} refused, {load.broken} broken"
    print(f"{gateways} gateways, {KILLS} kills: {summary}")
