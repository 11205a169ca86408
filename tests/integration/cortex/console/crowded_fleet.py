"""A fleet with long names and many rows, for tests of the console's layout."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cortex.console.conftest import speak
from cortex.console.fake_fleet import FakeFleet, running
from cortex.fake_node import FakeNode
from helexa.cortex.ledger.activity_and_usage_totals import Activity

LONG_MODEL = "mistral-community-extended/Mixtral-8x22B-Instruct-v0.1-abliterated-GGUF-imatrix:Q4_K_M"
UNBROKEN = "organizationwithaverylongname/" + "modelwithoutanyplacetobreak" * 3
LONG_NODE = "workstation-in-the-basement-of-building-7.eu-central-1.internal.example"
LONG_ACCOUNT = "maximiliane.von-und-zu-hohenlohe@research.department.example.org"
COLD = "another-organization/A-model-of-the-catalog-that-no-node-has-loaded-70B-Instruct"
REASON = (
    "the model needs 141,000 MB, and the node has 24,564 MB: /var/lib/helexa/models/"
    "a-very-long-folder-name-without-any-blank/" * 2
)


@contextmanager
def crowded_fleet() -> Iterator[FakeFleet]:
    """Run a gateway with a large node, a node that is down, a cordoned node, many keys and many requests."""
    large = FakeNode(name=LONG_NODE, speak=speak)
    for number in range(14):
        large.holds(f"Organization-{number % 3}/Model-{number}-Instruct", vram_used_mb=3900, limit={"context": 32_768})
    limit = {"context": 1_048_576, "output": 8192}
    large.holds(LONG_MODEL, UNBROKEN, vram_used_mb=141_300, limit=limit, tool_call=True, reasoning=True)
    large.models.append({"id": "loading/model", "status": "loading", "progress": 0.62, "stage": "reading weights"})
    large.models.append({"id": "broken/model", "status": "poisoned"})
    large.discovery["devices"] = [
        {"index": index, "name": "NVIDIA GeForce RTX 4090", "vram_total_mb": 24_564} for index in range(8)
    ]
    load = {"in_flight": 1234, "queue_depth": 567, "tok_s_decode": 12_345.6}
    load |= {"prompt_tokens_total": 9_999_999, "cached_prompt_tokens_total": 8_888_888, "saved_prompts_mb": 20_480}
    large.health = {
        "devices": [{"index": index, "vram_used_mb": 21_900, "vram_free_mb": 2_664} for index in range(8)],
        "models": [{"id": model["id"], **load} for model in large.models],
        "poisoned": [{"model_id": "broken/model", "error": REASON}],
    }
    small, down = FakeNode(name="n2", speak=speak).holds("Org/M"), FakeNode(name="n3").holds(LONG_MODEL)
    models = [{"id": COLD, "vram_mb": 140_000}, {"id": "small-org/cold", "vram_mb": 600}]
    with running(large, small, down, models=models) as fleet:
        down.down = True
        fleet.call("POST", "/api/nodes/n2/cordon")
        for number in range(25):
            account = LONG_ACCOUNT if number % 5 == 0 else f"account-{number}"
            secret = fleet.call("POST", "/api/keys", _key(account, number))["key"]
            assert fleet.ask(secret, (LONG_MODEL, UNBROKEN)[number % 2]) == 200
        fleet.run(_record(fleet))
        fleet.until(lambda: fleet.cortex.gateway.fleet.node("n3").misses > 2)
        yield fleet


async def _record(fleet: FakeFleet) -> None:
    ledger = fleet.cortex.gateway.ledger
    for number in range(40):
        ledger.record(_activity(number))
    await ledger.flush()


def _key(account: str, number: int) -> dict[str, Any]:
    limits = {"requests_per_minute": 6000, "tokens_per_minute": 12_000_000, "concurrency": 512}
    window = {"kind": "rolling", "seconds": 86_400}
    key = {"account_id": account, "key_id": f"{account[:50]}-{number}", "hard_cap": 123_456_789, "window": window}
    return key | limits | {"models": [LONG_MODEL, UNBROKEN], "expires_at": time.time() + 86_400 * 400}


def _activity(number: int) -> Activity:
    return Activity(
        request_id=f"{number:032x}",
        started_ms=int(time.time() * 1000) - number,
        api="/v1/chat/completions",
        model=LONG_MODEL if number % 2 else UNBROKEN,
        status=503 if number % 3 == 0 else 200,
        error_code="no_node_can_load_the_model" if number % 3 == 0 else None,
        duration_ms=123_456.0,
        account_id=LONG_ACCOUNT,
        key_id=f"{LONG_ACCOUNT}-1",
        node=LONG_NODE,
        route=f"node={LONG_NODE}; why=affinity; load=2; candidates=4",
        prompt=1_234_567,
        completion=123_456,
        cached=1_111_111,
        ttft_ms=61_000.0,
        tokens_per_second=12_345.6,
    )
