"""Keys, rate limits, budgets, charges and the activity log on every API."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cortex import fake_node
from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex

KEYS = [
    {"key": "capped", "account_id": "acme", "key_id": "capped", "hard_cap": 1000},
    {"key": "free", "account_id": "acme", "key_id": "free"},
    {"key": "other", "account_id": "other", "models": ["Org/Other"]},
    {"key": "slow", "account_id": "slow", "requests_per_minute": 1},
    {"key": "boss", "account_id": "boss", "role": "admin"},
]
CHAT = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
MESSAGES = CHAT | {"max_tokens": 50}
RESPONSES = {"model": "small", "input": "Hi", "max_output_tokens": 50}
COMPLETIONS = {"model": "small", "prompt": "Hi", "max_tokens": 50}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/api/chat": {"model": "small", "messages": CHAT["messages"], "options": {"num_predict": 50}, "stream": False},
    "/api/generate": {"model": "small", "prompt": "Hi", "options": {"num_predict": 50}, "stream": False},
}


@pytest.fixture
async def keyed(node: FakeNode) -> AsyncIterator[Cortex]:
    """A gateway that requires keys; `small` is an alias of `Org/M`."""
    settings = {"entitlements": {"require_auth": True, "keys": KEYS}}
    async with running_cortex(node, settings=settings, aliases={"small": "Org/M"}) as cortex:
        yield cortex


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def post(cortex: Cortex, path: str, key: str = "capped", **fields: Any) -> tuple[int, bytes, dict[str, str]]:
    async with cortex.client.post(cortex.url + path, json=BODIES[path] | fields, headers=bearer(key)) as response:
        headers = {name.lower(): value for name, value in response.headers.items()}
        return response.status, await response.read(), headers


async def spent(cortex: Cortex, key_id: str) -> tuple[int, int]:
    """Return the tokens that the ledger has charged to a key, and the number of open reservations."""
    principal = next(key.principal for key in cortex.gateway.authenticator.static if key.principal.key_id == key_id)
    budget = await cortex.gateway.ledger.budget(principal)
    return budget.spent, cortex.gateway.ledger.open


async def newest(cortex: Cortex) -> dict[str, Any]:
    """Return the newest row of the activity log, after waiting until it is written."""
    rows: list[dict[str, Any]] = []

    async def written() -> bool:
        rows[:] = await cortex.gateway.ledger.recent(1)
        return bool(rows)

    await eventually(written)
    return rows[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_charge_is_in_the_ledger_before_the_response_ends(keyed: Cortex, path: str, stream: bool) -> None:
    status, body, headers = await post(keyed, path, stream=stream)
    assert status == 200, body
    assert await spent(keyed, "capped") == (9, 0)
    assert headers["x-helexa-route"].startswith("node=n1; why=only;")
    assert await keyed.sample("cortex_spend_tokens_total", account="acme", key="capped") == 9
    row = await newest(keyed)
    assert (row["api"], row["alias"], row["model"], row["prompt"], row["completion"]) == (path, "small", "Org/M", 7, 2)
    assert (row["request_id"], row["key_id"]) == (headers["x-request-id"], "capped")


async def responses_stream(node: FakeNode, request: Any) -> Any:
    usage = {"input_tokens": 11, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}}
    delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hi"}\n\n'
    done = json.dumps({"type": "response.completed", "response": {"usage": usage}}).encode()
    return await fake_node.begin(request, delta, b"event: response.completed\ndata: " + done + b"\n\n")


async def test_usage_of_responses_api_is_charged(keyed: Cortex, node: FakeNode) -> None:
    node.speak = responses_stream
    assert (await post(keyed, "/v1/responses", stream=True))[0] == 200
    assert await spent(keyed, "capped") == (15, 0)


async def test_duplicate_model_fields_do_not_bypass_a_keys_model_list(node: FakeNode) -> None:
    node.holds("Org/Secret")
    settings = {
        "neurons": [{"name": "n1", "endpoint": node.url, "kind": "openai"}],
        "entitlements": {"keys": [{"key": "one", "account_id": "a", "models": ["Org/M"]}]},
    }
    allowed, secret = b'"model":"Org/M"', b'"Org/Secret"'
    async with running_cortex(node, settings=settings) as cortex:

        async def status(path: str, fields: bytes) -> int:
            body = b'{"max_tokens":9,"messages":[{"role":"user","content":"Hi"}],%b}' % fields
            async with cortex.client.post(cortex.url + path, data=body, headers=bearer("one")) as response:
                assert "error" in await response.json() or response.status == 200
                return response.status

        for name in (b'"model"', b'"Model"', b'"MODEL"', b'"m\\u006fdel"', b'"\\u004dodel"'):
            assert await status("/v1/chat/completions", b"%b:%b,%b" % (name, secret, allowed)) == 400
            assert await status("/v1/chat/completions", b"%b,%b:%b" % (allowed, name, secret)) in (400, 403)
            assert await status("/v1/messages", b"%b:%b,%b" % (name, secret, allowed)) in (200, 400)
        assert await status("/v1/chat/completions", b'"max_tokens":1,"Stream":true,' + allowed) == 200
    assert all(secret not in body for body in node.bodies)
    assert node.bodies[-1] == b'{"max_tokens":1,"messages":[{"role":"user","content":"Hi"}],"model":"Org/M"}'


@pytest.mark.parametrize("path", BODIES)
async def test_request_above_the_cap_of_its_key_is_rejected_on_every_api(
    keyed: Cortex, node: FakeNode, path: str
) -> None:
    field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    limit: dict[str, Any] = {"options": {"num_predict": 1000}} if path.startswith("/api/") else {field: 1000}
    status, body, headers = await post(keyed, path, **limit)
    error = json.loads(body)["error"]
    assert status == 429
    assert "retry-after" not in headers
    if path.startswith("/api/"):
        assert "tokens are left" in error
    else:
        assert error["type"] == ("rate_limit_error" if path == "/v1/messages" else "insufficient_quota")
    assert node.bodies == []
    assert await spent(keyed, "capped") == (0, 0)


@pytest.mark.parametrize("path", BODIES)
async def test_request_without_a_key_is_401_on_every_api(keyed: Cortex, node: FakeNode, path: str) -> None:
    async with keyed.client.post(keyed.url + path, json=BODIES[path]) as response:
        assert response.status == 401
        error = (await response.json())["error"]
    if path.startswith("/api/"):
        assert error.startswith("missing API key")
    else:
        assert error["type"] == ("authentication_error" if path == "/v1/messages" else "invalid_request_error")
    assert node.bodies == []


async def test_key_is_read_from_x_api_key_or_authorization(keyed: Cortex) -> None:
    for headers in ({"x-api-key": "free"}, {"Authorization": "bearer free"}):
        async with keyed.client.post(f"{keyed.url}/v1/messages", json=MESSAGES, headers=headers) as response:
            assert response.status == 200
    assert (await spent(keyed, "free"))[0] == 18


async def test_api_key_with_a_model_list_can_list_and_use_only_these_models(keyed: Cortex, node: FakeNode) -> None:
    node.holds("Org/Other")

    async def listed(key: str) -> set[str]:
        async with keyed.client.get(f"{keyed.url}/v1/models", headers=bearer(key)) as response:
            return {entry["id"] for entry in (await response.json())["data"]}

    async def polled() -> bool:
        return "Org/Other" in await listed("free")

    await eventually(polled)
    assert await listed("other") == {"Org/Other"}
    status, body, _ = await post(keyed, "/v1/chat/completions", "other")
    assert (status, json.loads(body)["error"]["code"]) == (403, "model_not_allowed")
    assert (await post(keyed, "/v1/chat/completions", "other", model="Org/Other"))[0] == 200


async def test_request_above_the_rate_limit_of_a_key_is_429_with_retry_after(keyed: Cortex) -> None:
    first, second = [await post(keyed, "/v1/chat/completions", "slow") for _ in range(2)]
    assert first[0] == 200
    assert first[2]["x-ratelimit-remaining-requests"] == "0"
    assert (second[0], json.loads(second[1])["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(second[2]["retry-after"]) <= 60


async def test_client_that_disconnects_is_charged_for_the_generated_tokens(keyed: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.never_end
    async with keyed.client.post(
        f"{keyed.url}/v1/chat/completions", json=CHAT | {"stream": True}, headers=bearer("capped")
    ) as response:
        await response.content.readuntil(b'"a"')

    async def closed() -> bool:
        tokens, open_reservations = await spent(keyed, "capped")
        return open_reservations == 0 and tokens == len(json.dumps(CHAT | {"stream": True})) // 4 + 1

    await eventually(closed)
    row = await newest(keyed)
    assert (row["client_gone"], row["status"], row["completion"]) == (True, 499, 1)


async def test_broken_stream_is_charged_for_the_received_tokens(keyed: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.die_within_an_event
    await post(keyed, "/v1/chat/completions", stream=True)
    tokens, open_reservations = await spent(keyed, "capped")
    assert (tokens > 0, open_reservations) == (True, 0)


@pytest.mark.parametrize("speak", [fake_node.refuse, fake_node.die_before_the_first_byte])
async def test_request_that_got_no_response_is_not_charged(
    keyed: Cortex, node: FakeNode, speak: fake_node.Speak
) -> None:
    node.speak = speak
    assert (await post(keyed, "/v1/chat/completions"))[0] >= 500
    assert await spent(keyed, "capped") == (0, 0)


async def test_tokens_of_concurrent_requests_stay_within_the_cap_of_their_key(keyed: Cortex) -> None:
    responses = await asyncio.gather(*(post(keyed, "/v1/chat/completions") for _ in range(60)))
    served = [status for status, _, _ in responses].count(200)
    assert {status for status, _, _ in responses} <= {200, 429}
    tokens, open_reservations = await spent(keyed, "capped")
    assert (tokens, open_reservations) == (9 * served, 0)
    assert 0 < tokens <= 1000


async def test_identity_headers_sent_by_clients_are_replaced_by_the_gateway(keyed: Cortex, node: FakeNode) -> None:
    claimed = {"x-helexa-account-id": "boss", "x-request-id": "mine-1"} | bearer("free")
    async with keyed.client.post(f"{keyed.url}/v1/chat/completions", json=CHAT, headers=claimed) as response:
        assert response.headers["x-request-id"] == "mine-1"
    headers = node.headers[0]
    assert (headers["x-helexa-account-id"], headers["x-helexa-key-id"], headers["x-request-id"]) == (
        "acme",
        "free",
        "mine-1",
    )
    assert "authorization" not in headers


async def test_prompt_above_the_context_limit_is_400(keyed: Cortex, node: FakeNode) -> None:
    node.models[0]["limit"] = {"context": 50}

    async def refused() -> bool:
        status, body, _ = await post(
            keyed, "/v1/chat/completions", "free", messages=[{"role": "user", "content": "x" * 6400}]
        )
        error = json.loads(body).get("error", {})
        return status == 400 and (error["code"], error["max"]) == ("context_length_exceeded", 50)

    await eventually(refused)


async def test_endpoints_about_the_fleet_require_an_admin_key(keyed: Cortex) -> None:
    for path in ("/api/nodes", "/api/events?topics=nodes", "/api/explain?model=small"):
        for key, status in (("free", 403), ("boss", 200)):
            async with keyed.client.get(keyed.url + path, headers=bearer(key)) as response:
                assert response.status == status, path
        async with keyed.client.get(keyed.url + path) as response:
            assert response.status == 401
    async with keyed.client.post(f"{keyed.url}/api/nodes/n1/cordon", headers=bearer("free")) as response:
        assert response.status == 403


async def test_count_tokens_is_not_charged_to_the_budget(keyed: Cortex, node: FakeNode) -> None:
    async with keyed.client.post(
        f"{keyed.url}/v1/messages/count_tokens", json=MESSAGES, headers=bearer("capped")
    ) as response:
        assert response.status == 200
        assert (await response.json())["input_tokens"] >= 1
    assert await spent(keyed, "capped") == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_disconnect_cancels_the_node_request_on_every_api(
    keyed: Cortex, node: FakeNode, path: str, stream: bool
) -> None:
    node.speak = fake_node.never_end if stream else fake_node.never_begin
    asking = asyncio.create_task(post(keyed, path, stream=stream))
    await eventually(lambda: node.speaking)
    asking.cancel()
    await asyncio.wait((asking,))
    await eventually(lambda: not node.speaking)
    await eventually(lambda: not keyed.gateway.ledger.open)
    assert keyed.gateway.fleet.view().in_flight == {}


async def test_tool_arguments_are_sent_as_text_to_backends_and_as_objects_to_helexa_nodes(node: FakeNode) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "blue"}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "Org/M", "max_tokens": 5, "messages": messages}
    async with FakeNode("box").holds("Box/M").serving() as box:
        neurons = [
            {"name": "n1", "endpoint": node.url},
            {"name": "box", "endpoint": box.url, "kind": "openai"},
        ]
        async with running_cortex(node, ready=False, settings={"neurons": neurons}) as cortex:
            arguments = {}
            for name, target in (("Org/M", node), ("Box/M", box)):

                async def served(name: str = name) -> bool:
                    async with cortex.client.post(f"{cortex.url}/v1/messages", json=body | {"model": name}) as response:
                        return response.status == 200

                await eventually(served)
                arguments[name] = json.loads(target.bodies[-1])["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"Org/M": {"at": "sky"}, "Box/M": '{"at":"sky"}'}


async def test_configured_bearer_of_a_node_is_sent_with_every_request_to_the_node() -> None:
    async with FakeNode().serving() as node:
        neurons = [{"name": "n1", "endpoint": node.url, "bearer": "the-nodes"}]
        async with running_cortex(node, settings={"neurons": neurons}, models=[{"id": "Org/Cold"}]) as cortex:
            body = {"model": "Org/Cold", "messages": []}
            async with cortex.client.post(
                f"{cortex.url}/v1/chat/completions", json=body, headers=bearer("the-clients")
            ) as response:
                assert response.status == 200
        assert node.loads
        assert node.headers[-1]["authorization"] == "Bearer the-nodes"
        assert set(node.authorizations) == {"Bearer the-nodes"}
