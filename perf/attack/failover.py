"""Kill the PostgreSQL primary of several gateways under load, and check that all charges are correct.

usage: python perf/attack/failover.py [--gateways 3] [--clients 100] [--down 3]

The gateways share the ledger (the database of API keys and charges) in PostgreSQL, on a primary and a hot standby with
synchronous replication. The ledger's URL lists both servers. Clients send requests to all gateways without a pause
during two outages:

1. The script kills the primary. After `--down` seconds, it promotes the standby.
2. Later, it makes the promoted server read-only for `--down` seconds.

For each outage, the script prints a JSON line with the statuses of `/health` and `/health/ready` during the outage, and
the seconds until every gateway is ready and answers again. The last line has the results of the checks; the exit code
is 1 if a check failed:

* Every complete answer has one settled ledger entry with the exact charge.
* The key does not exceed its cap.
* The spent amount of the budget equals the sum of the ledger entries.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/unit"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/e2e"))

from cortex.fake_node import FakeNode
from cortex.postgres import Postgres, running_postgres
from faults import test_gateway_kills
from faults.test_gateway_kills import CAPPED, Counting, Gateway, Load, spent
from helexa.cortex.ledger.storage import open_database

CAP = 50_000_000
LIMIT_SECS = 10.0
WARM_SECS = 3.0
_BODY = {"model": "Org/M", "messages": [], "max_tokens": 40}


async def status(session: aiohttp.ClientSession, url: str, method: str = "GET", **options: Any) -> int:
    async with session.request(method, url, **options) as response:
        await response.read()
        return response.status


async def recovery(session: aiohttp.ClientSession, gateway: Gateway, began: float) -> float:
    """Wait until a gateway reports that it is ready and completes a request.

    Returns:
        Seconds from the time `began` (of `time.monotonic`) to the completed request.
    """
    async with asyncio.timeout(60):
        while True:
            ready = await status(session, f"{gateway.url}/health/ready") == 200
            if (
                ready
                and await status(session, f"{gateway.url}/v1/chat/completions", "POST", json=_BODY, headers=CAPPED)
                == 200
            ):
                return time.monotonic() - began
            await asyncio.sleep(0.05)


async def outage(session: aiohttp.ClientSession, gateways: list[Gateway], down_secs: float) -> Counter[str]:
    """Poll the health routes of all gateways for `down_secs` seconds. Return the number of responses by status."""
    statuses = Counter[str]()
    end = time.monotonic() + down_secs
    while time.monotonic() < end:
        for gateway in gateways:
            for path in ("/health", "/health/ready"):
                statuses[f"{path} {await status(session, gateway.url + path)}"] += 1
        await asyncio.sleep(0.1)
    return statuses


async def failures(
    primary: Postgres, standby: Postgres, gateways: list[Gateway], down_secs: float
) -> list[dict[str, Any]]:
    """Cause both outages (failover, read-only database), print a JSON line for each, and return the lines."""
    results: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as session:
        for name in ("failover", "read-only"):
            await asyncio.sleep(WARM_SECS)
            await asyncio.to_thread(primary.stop if name == "failover" else lambda: standby.set_read_only(True))
            statuses = await outage(session, gateways, down_secs)
            await asyncio.to_thread(standby.promote if name == "failover" else lambda: standby.set_read_only(False))
            began = time.monotonic()
            secs = await asyncio.gather(*(recovery(session, gateway, began) for gateway in gateways))
            result = {
                "outage": name,
                "down_secs": down_secs,
                **statuses,
                "recovered_secs": [round(seconds, 2) for seconds in secs],
            }
            print(json.dumps(result), flush=True)
            results.append(result | {"longest": max(secs)})
        await asyncio.sleep(WARM_SECS)
    return results


async def check(url: str, load: Load, counting: Counting) -> dict[str, Any]:
    """Compare the charges in the database with the complete responses that clients received.

    Returns:
        The fields of the last output line.
    """
    database = await open_database(url)
    entries = await database.fetch("SELECT request_id, state, charged, estimated FROM entries")
    booked = await spent(database)
    await database.close()
    exact: dict[str, list[int]] = {}
    for entry in entries:
        if entry["state"] == "settled" and not entry["estimated"]:
            exact.setdefault(entry["request_id"], []).append(entry["charged"])
    return {
        "complete_answers": len(load.finished),
        "wrong_charges": sum(exact.get(name) != [counting.tokens[name]] for name in load.finished),
        "states": Counter(entry["state"] for entry in entries),
        "charged": sum(entry["charged"] for entry in entries),
        "spent_of_budget": booked,
    }


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--down", type=float, default=3.0)
    arguments = parser.parse_args()
    test_gateway_kills.CAP, test_gateway_kills.AT_ONCE = CAP, arguments.clients
    with (
        tempfile.TemporaryDirectory() as folder,
        running_postgres() as primary,
        running_postgres(primary) as standby,
    ):
        primary.wait_for_standbys()
        url = primary.new_database(standby)
        async with FakeNode().holds("Org/M").serving() as node:
            node.speak = counting = Counting(8)
            gateways = [Gateway(Path(folder), number, node, url) for number in range(arguments.gateways)]
            for gateway in gateways:
                await gateway.start()
            load = Load(gateways)
            asking = asyncio.create_task(load.run())
            try:
                results = await failures(primary, standby, gateways, arguments.down)
            finally:
                load.stop.set()
                await asking
                for gateway in gateways:
                    await gateway.stop()
        outcome = await check(url, load, counting)
    good = outcome["wrong_charges"] == 0 and outcome["charged"] == outcome["spent_of_budget"] <= CAP
    good = good and all(result["longest"] <= LIMIT_SECS for result in results)
    print(json.dumps(outcome | {"passed": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
