"""`/api/usage`: sums of charges by day, account, key and model, as JSON and CSV."""

import csv
import io
import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest
from pydantic import ValidationError

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.core.catalog import Catalog

KEYS = [
    {"key": "root", "account_id": "ops", "role": "admin"},
    {"key": "a1", "account_id": "alice", "key_id": "=alice(1)"},
    {"key": "a2", "account_id": "alice", "key_id": "alice-2"},
    {"key": "b", "account_id": "bob"},
]
TOKENS = 9  # of one response of the fake node
COST = (4 * 2.0 + 3 * 0.5 + 2 * 10.0) / 1e6  # 7 prompt tokens, of which 3 are cached, and 2 output tokens


@pytest.fixture
async def used(node: FakeNode) -> AsyncIterator[Cortex]:
    node.holds("Org/Other")
    models = [{"id": "Org/M", "cost": {"input": 2.0, "output": 10.0, "cache_read": 0.5}}]
    settings = {"entitlements": {"require_auth": True, "keys": KEYS}}
    async with running_cortex(node, settings=settings, models=models) as cortex:
        for key, model in (("a1", "Org/M"), ("a1", "Org/Other"), ("a2", "Org/M"), ("b", "Org/M"), ("b", "unknown")):
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
            headers = {"authorization": f"Bearer {key}"}
            async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
                await response.read()
        yield cortex


async def usage(cortex: Cortex, query: str = "", key: str = "root") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with cortex.client.get(f"{cortex.url}/api/usage{query}", headers=headers) as response:
        is_json = response.content_type == "application/json"
        return response.status, await response.json() if is_json else await response.text()


async def test_usage_report_sums_charges_by_day_key_and_model(used: Cortex) -> None:
    _, report = await usage(used)
    rows = [
        (row["account_id"], row["key_id"], row["model"], row["requests"], row["charged"]) for row in report["usage"]
    ]
    assert rows == [
        ("alice", "=alice(1)", "Org/M", 1, TOKENS),
        ("alice", "=alice(1)", "Org/Other", 1, TOKENS),
        ("alice", "alice-2", "Org/M", 1, TOKENS),
        ("bob", "bob", "Org/M", 1, TOKENS),
    ]
    assert {row["cached"] for row in report["usage"]} == {3}


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("account_id", [("alice", 3), ("bob", 1)]),
        ("model", [("Org/M", 3), ("Org/Other", 1)]),
    ],
)
async def test_usage_report_grouped_by_one_column_sums_over_all_other_columns(
    used: Cortex, by: str, expected: list[tuple[str, int]]
) -> None:
    _, report = await usage(used, f"?by={by}&days=1")
    assert [(row[by], row["requests"]) for row in report["usage"]] == expected


async def test_filters_of_the_usage_report_restrict_the_total(used: Cortex) -> None:
    _, report = await usage(used, "?by=&account_id=alice&model=Org/M")
    sums = {"requests": 2, "prompt": 14, "completion": 4, "cached": 6, "charged": 2 * TOKENS, "estimated": 0}
    assert report["usage"] == [sums | {"cost": 2 * COST, "unpriced": 0}]
    _, nothing = await usage(used, "?by=&account_id=nobody")
    assert nothing["usage"] == []


async def test_usage_report_has_costs_for_models_with_a_price_and_none_for_others(used: Cortex) -> None:
    _, report = await usage(used, "?by=account_id")
    costs = {row["account_id"]: (row["cost"], row["unpriced"]) for row in report["usage"]}
    assert costs == {"alice": (pytest.approx(2 * COST), 1), "bob": (pytest.approx(COST), 0)}
    _, report = await usage(used, "?by=model")
    assert {row["model"]: row["cost"] for row in report["usage"]} == {
        "Org/M": pytest.approx(3 * COST),
        "Org/Other": None,
    }


async def test_usage_report_by_hour_names_the_hours_of_the_requests(used: Cortex) -> None:
    _, report = await usage(used, "?by=hour&days=2")
    hours = [datetime.fromisoformat(row["hour"]) for row in report["usage"]]
    assert all(abs(time.time() - hour.timestamp()) < 7200 and hour.minute == 0 for hour in hours)
    assert sum(row["requests"] for row in report["usage"]) == 4


@pytest.mark.parametrize("cost", [{"input": -1.0, "output": 1.0}, {"input": 1.0}, {"input": "inf", "output": 1.0}])
def test_model_catalog_rejects_invalid_prices(cost: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Catalog.model_validate({"models": [{"id": "Org/M", "cost": cost}]})


async def test_user_gets_only_the_usage_of_their_own_account(used: Cortex) -> None:
    _, report = await usage(used, key="b")
    assert {row["account_id"] for row in report["usage"]} == {"bob"}
    assert (await usage(used, "?account_id=alice", key="b"))[0] == 403
    assert (await usage(used, "?account_id=bob", key="b"))[0] == 200
    assert (await usage(used, key="unknown"))[0] == 401


async def test_csv_usage_report_has_the_same_rows_as_json_and_no_formulas(used: Cortex) -> None:
    _, text = await usage(used, "?format=csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["key_id"] for row in rows] == ["'=alice(1)", "'=alice(1)", "alice-2", "bob"]
    assert {row["charged"] for row in rows} == {str(TOKENS)}


@pytest.mark.parametrize("query", ["?days=0", "?days=367", "?days=x", "?by=node", "?by=day,day", "?format=xml"])
async def test_invalid_parameters_of_the_usage_report_are_400(used: Cortex, query: str) -> None:
    assert (await usage(used, query))[0] == 400
