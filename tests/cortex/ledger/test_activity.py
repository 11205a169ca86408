"""The activity log: what is shown of it, and that it stays bounded."""

from typing import Any

import pytest

from cortex.ledger.running import holder, rows, running
from cortex.running import eventually
from helexa.cortex.ledger.activity import KEPT, Activity, ActivityLog
from helexa.cortex.ledger.ledger import Ledger


def activity(number: int, **fields: Any) -> Activity:
    defaults = {"api": "/v1/chat/completions", "model": "Org/M", "status": 200, "duration_ms": 12.5}
    return Activity(f"req-{number}", 1_700_000_000_000 + number, **defaults | fields)


async def written(ledger: Ledger, count: int) -> None:
    async def all_there() -> bool:
        return len(await ledger.recent(1000)) == count

    await eventually(all_there)


async def test_a_request_is_shown_as_it_was(url: str):
    async with running(url) as [ledger]:
        ledger.record(
            activity(
                1,
                account_id="account",
                key_id="key",
                alias="small",
                node="beast",
                route="prefix",
                prompt=10,
                completion=20,
                cached=5,
                ttft_ms=80.5,
                waited_ms=1.5,
                tokens_per_second=42.0,
                client_gone=True,
            )
        )
        ledger.record(activity(2, status=429, error_code="insufficient_quota"))
        await written(ledger, 2)
        refused, whole = await ledger.recent()
        assert (refused["status"], refused["error_code"], refused["node"]) == (429, "insufficient_quota", None)
        assert whole.pop("id") < refused["id"]
        assert whole == {
            "request_id": "req-1",
            "started_ms": 1_700_000_000_001,
            "account_id": "account",
            "key_id": "key",
            "api": "/v1/chat/completions",
            "model": "Org/M",
            "alias": "small",
            "node": "beast",
            "route": "prefix",
            "status": 200,
            "error_code": None,
            "prompt": 10,
            "completion": 20,
            "cached": 5,
            "ttft_ms": 80.5,
            "duration_ms": 12.5,
            "waited_ms": 1.5,
            "tokens_per_second": 42.0,
            "client_gone": True,
        }


async def test_the_newest_come_first_page_by_page_and_filtered(url: str):
    async with running(url) as [ledger]:
        for number in range(10):
            ledger.record(activity(number, node=f"node-{number % 2}", status=200 if number < 8 else 503))
        await written(ledger, 10)
        page = await ledger.recent(4)
        assert [row["request_id"] for row in page] == ["req-9", "req-8", "req-7", "req-6"]
        page = await ledger.recent(4, before=page[-1]["id"])
        assert [row["request_id"] for row in page] == ["req-5", "req-4", "req-3", "req-2"]
        page = await ledger.recent(node="node-1", status=200, model="Org/M", key_id=None)
        assert [row["request_id"] for row in page] == ["req-7", "req-5", "req-3", "req-1"]
        with pytest.raises(ValueError, match="no such filter: id; DROP"):
            await ledger.recent(**{"id; DROP TABLE activity": 1})


async def test_only_the_newest_are_kept(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("helexa.cortex.ledger.activity.KEPT", 100)
    monkeypatch.setattr("helexa.cortex.ledger.committer._MANY_ROWS", 50)
    async with running(url) as [ledger]:
        for number in range(1050):
            ledger.record(activity(number))
            if number % 50 == 49:  # so many rows to a batch
                await (await ledger.reserve(holder(None), "r", "Org/M", 1)).release()
                await ledger.flush()
    found = await rows(url, "SELECT request_id FROM activity ORDER BY id")
    assert found[-1]["request_id"] == "req-1049"
    assert 100 <= len(found) < 600


def test_a_log_that_falls_behind_drops_and_counts():
    log = ActivityLog()
    for number in range(KEPT + 7):
        log.append(activity(number))
    assert (len(log), log.dropped) == (KEPT, 7)
    log.steps()
    assert (len(log), log.steps()) == (0, [])


async def test_texts_that_a_column_cannot_hold_do_not_stop_the_ledger(url: str):
    async with running(url) as [ledger]:
        ledger.record(activity(1, alias="nul\0 and \ud800" + "é" * 500, prompt=10**30))
        await written(ledger, 1)
        (row,) = await ledger.recent()
        assert row["alias"].startswith("nul and ?é") and row["prompt"] == 1 << 53
