"""No request is charged more than its reservation, and no key more than its cap, for any input."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cortex.budgets.budget_attack import CHAT, COMPLETIONS, KEYS, RESPONSES, attacking, random_attack


@pytest.mark.parametrize("seed", range(3))
async def test_tokens_of_random_requests_stay_within_the_cap_of_their_key(tmp_path: Path, seed: int) -> None:
    attack = await random_attack(tmp_path, seed, requests=160)
    assert attack.statuses[200] > 10
    assert attack.statuses[400] > 10
    assert attack.statuses[429] > 10


def chat(content: str = "Hi", model: str = "Own/Small", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


CASES = {
    "no limit at a context of 1,024": (CHAT, chat()),
    "four choices": (CHAT, chat(n=4)),
    "another API's limit": (CHAT, chat(max_output_tokens=1)),
    "another API's limit on completions": (COMPLETIONS, {"model": "Own/Small", "prompt": "x", "max_output_tokens": 1}),
    "two limits on a third-party backend": (
        CHAT,
        chat(model="Box/Unknown", max_completion_tokens=1, max_tokens=100_000),
    ),
    "no limit on a third-party backend": (CHAT, chat(model="Box/Unknown")),
    "digits": (CHAT, chat("1234567890" * 60, max_tokens=10)),
    "emoji": (CHAT, chat("🦊" * 100, max_tokens=10)),
    "Responses API": (RESPONSES, {"model": "Own/Large", "input": "1234567890" * 60, "max_output_tokens": 10}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_budget_reservation_covers_all_tokens_that_a_node_may_use(
    tmp_path: Path, case: str, stream: bool
) -> None:
    path, body = CASES[case]
    async with attacking(tmp_path) as attack:
        for key in ("k0", "k2", "k5", "k7"):
            await attack.ask(key, path, json.dumps(body | {"stream": stream}).encode())
            await attack.check()
        assert attack.statuses[200] >= 2


@pytest.mark.parametrize("fields", [{"n": 10.0}, {"n": "10"}, {"max_tokens": 100_000.0}, {"max_tokens": True}])
async def test_token_limits_of_wrong_type_are_rejected_before_tokens_are_reserved(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with attacking(tmp_path) as attack:
        for model in ("Own/Small", "Box/Unknown"):
            assert await attack.ask("k7", CHAT, json.dumps(chat(model=model, **fields)).encode()) == 400
        assert await attack.entries() == []


@pytest.mark.parametrize("model", ["Own/Large", "Box/Unknown"])
async def test_tokens_of_parallel_requests_stay_within_the_cap_of_their_key(tmp_path: Path, model: str) -> None:
    async with attacking(tmp_path) as attack:
        body = json.dumps(chat(model=model)).encode()
        statuses = await asyncio.gather(*(attack.ask("k5", CHAT, body) for _ in range(30)))
        await attack.check()
        assert set(statuses) == {200, 429}
        assert 0 < attack.charged <= KEYS[5]["hard_cap"]
