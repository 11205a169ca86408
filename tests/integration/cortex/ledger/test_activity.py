"""The activity log: listing, filtering, and its bounded size."""

from typing import Any

import pytest

from cortex.ledger.ledger_helpers import holder, rows, running
from cortex.running_gateway import eventually
from helexa.cortex.ledger.activity_and_usage_totals import MAX_ROWS, Activity, ActivityLog
from helexa.cortex.ledger.ledger import Ledger


def activity(number: int, **fields: Any) -> Activity:
    defaults = {"api": "/v1/chat/completions", "model": "Org/M", "status": 200, "duration_ms": 12.5}
    return Activity(f"req-{number}", 1_700_000_000_000 + number, **defaults | fields)


async def wait_for_rows(ledger: Ledger, count: int) -> None:
    async def all_written() -> bool:
        return len(await ledger.recent(1000)) == count

    await eventually(all_written)


async def test_recorded_request_is_listed_with_all_fields(url: str):
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
                client="203.0.113.7",
            )
        )
        ledger.record(activity(2, status=429, error_code="insufficient_quota"))
        await wait_for_rows(ledger, 2)
        rejected, complete = await ledger.recent()
        assert (rejected["status"], rejected["error_code"], rejected["node"]) == (429, "insufficient_quota", None)
        assert complete.pop("id") < rejected["id"]
        assert complete == {
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
            "client": "203.0.113.7",
        }


async def test_activity_is_paged_newest_first_and_filtered(url: str):
    async with running(url) as [ledger]:
        for number in range(10):
            ledger.record(activity(number, node=f"node-{number % 2}", status=200 if number < 8 else 503))
        await wait_for_rows(ledger, 10)
        page = await ledger.recent(4)
        assert [row["request_id"] for row in page] == ["req-9", "req-8", "req-7", "req-6"]
        page = await ledger.recent(4, before=page[-1]["id"])
        assert [row["request_id"] for row in page] == ["req-5", "req-4", "req-3", "req-2"]
        page = await ledger.recent(node="node-1", status=200, model="Org/M", key_id=None)
        assert [row["request_id"] for row in page] == ["req-7", "req-5", "req-3", "req-1"]
        with pytest.raises(ValueError, match="no such filter: id; DROP"):
            await ledger.recent(**{"id; DROP TABLE activity": 1})


async def test_oldest_activity_rows_above_the_row_limit_are_deleted(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("helexa.cortex.ledger.activity_and_usage_totals.MAX_ROWS", 100)
    monkeypatch.setattr("helexa.cortex.ledger.group_commit._ACTIVITY_BATCH_ROWS", 50)
    async with running(url) as [ledger]:
        for number in range(1050):
            ledger.record(activity(number))
            if number % 50 == 49:  # one batch for every 50 rows
                await (await ledger.reserve(holder(None), "r", "Org/M", 1)).release()
                await ledger.flush()
    kept_rows = await rows(url, "SELECT request_id FROM activity ORDER BY id")
    assert kept_rows[-1]["request_id"] == "req-1049"
    assert 100 <= len(kept_rows) < 600


def test_activity_log_drops_and_counts_rows_above_its_maximum():
    log = ActivityLog()
    for number in range(MAX_ROWS + 7):
        log.append(activity(number))
    assert (len(log), log.dropped) == (MAX_ROWS, 7)
    log.steps()
    assert (len(log), log.steps()) == (0, [])


async def test_activity_values_too_large_for_their_columns_are_clamped(url: str):
    async with running(url) as [ledger]:
        ledger.record(activity(1, alias="nul\0 and \ud800" + "é" * 500, prompt=10**30))
        await wait_for_rows(ledger, 1)
        (row,) = await ledger.recent()
        assert row["alias"].startswith("nul and ?é") and row["prompt"] == 1 << 53
