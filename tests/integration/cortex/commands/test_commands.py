"""Commands that call a running gateway, and `cortex check`."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cli.screen import CTRL_C, Screen
from cortex.cortex_process import run
from helexa.core.errors import HelexaError
from helexa.cortex.fleet_commands import GatewayApi
from helexa.cortex.key_and_node_commands import duration_text, parse_duration
from ports import free_port

EXPLAINED = {
    "model": "Org/M",
    "decision": "cold",
    "node": "beast",
    "reason": "room after unloading",
    "evict": ["Org/A", "Org/B"],
    "retry_after": None,
    "candidates": [
        {"node": "beast", "warm": False, "verdict": "needs 6500 MB, 2300 free"},
        {"node": "attic", "warm": False, "verdict": "too small"},
    ],
}
ENDED = {
    "started_ms": 1_700_000_000_000,
    "duration_ms": 1500.0,
    "key_id": None,
    "alias": "sm\x1b[31mall",
    "model": "Org/M",
    "node": "beast",
    "status": 200,
    "error_code": None,
    "client_gone": True,
    "prompt": 12,
    "cached": 3,
    "completion": 4,
    "ttft_ms": 250.0,
    "tokens_per_second": 40.25,
}


class Gateway:
    """A fake gateway with scripted responses that records its requests."""

    def __init__(self, responses: dict[str, Any]) -> None:
        self.responses = responses
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""

    async def respond(self, request: web.Request) -> web.Response:
        self.requests.append((request.method, request.path_qs, request.headers.get("Authorization")))
        response = self.responses.get(request.path)
        if response is None:
            return web.json_response({"error": {"message": "there is no\nsuch \x1bthing"}}, status=404)
        return response if isinstance(response, web.Response) else web.json_response(response)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Gateway"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


async def test_explain_prints_for_each_node_why_it_can_or_cannot_serve_the_model() -> None:
    async with Gateway({"/api/explain": EXPLAINED}).serving() as gateway:
        code, out, err = await run("explain", "Org/M&x", "-e", gateway.url, HELEXA_API_KEY="k")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "Org/M: cold on beast",
        "  room after unloading",
        "  unloads Org/A, Org/B",
        "  - beast: needs 6500 MB, 2300 free",
        "  - attic: too small",
    ]
    assert gateway.requests == [("GET", "/api/explain?model=Org%2FM%26x", "Bearer k")]


async def test_commands_print_json_and_read_the_gateway_url_from_the_environment() -> None:
    responses = {"/api/explain": EXPLAINED, "/api/activity": {"requests": [ENDED]}, "/health": {"status": "ok"}}
    listed = {"data": [{"id": "Org/M", "locations": [{"node": "beast", "status": "loaded"}]}]}
    async with Gateway(responses | {"/v1/models": listed}).serving() as gateway:
        base_url = gateway.url + "/v1"
        explain = await run("explain", "Org/M", "--json", HELEXA_BASE_URL=base_url)
        top = await run("top", "--json", "--url", base_url)
        status = await run("status", "--json", "--endpoint", gateway.url)
    assert [code for code, _, _ in (explain, top, status)] == [0, 0, 0]
    assert json.loads(explain[1]) == EXPLAINED
    assert json.loads(top[1]) == {"requests": [ENDED]}
    assert json.loads(status[1]) == {"health": {"status": "ok"}, "models": listed["data"]}


async def test_top_with_option_once_prints_a_table_of_ended_requests() -> None:
    async with Gateway({"/api/activity": {"requests": [ENDED]}}).serving() as gateway:
        code, out, err = await run("top", "--once", "-n", "5", "-e", gateway.url, "--key", "k", TZ="UTC")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["ENDED", "KEY", "MODEL", "NODE", "STATUS", "PROMPT", "CACHED", "OUTPUT", "TTFT", "SECONDS", "TOK/S"],
        ["22:13:21", "-", "sm[31mall", "beast", "200", "left", "12", "3", "4", "0.25", "1.50", "40.2"],
    ]
    assert gateway.requests == [("GET", "/api/activity?limit=5", "Bearer k")]


async def test_top_command_refreshes_its_table_until_ctrl_c() -> None:
    responses: dict[str, Any] = {"/api/activity": {"requests": [ENDED]}}
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    async with Gateway(responses).serving() as gateway:
        screen = Screen(["top", "-e", gateway.url], terminal, "helexa.cortex")
        try:
            await asyncio.to_thread(screen.expect, "beast")
            responses["/api/activity"] = {"requests": [{**ENDED, "node": "attic"}]}
            await asyncio.to_thread(screen.expect, "attic")
            del responses["/api/activity"]
            await asyncio.to_thread(screen.expect, "there is no such thing")
            await asyncio.to_thread(screen.expect, "attic")
            screen.type(CTRL_C)
            assert await asyncio.to_thread(screen.wait_for_exit) == 0
        finally:
            screen.close()
    assert "Traceback" not in screen.text


async def test_drain_command_fails_while_requests_run_on_the_node() -> None:
    empty, busy = ({"cordoned": True, "in_flight": running, "loading": 0} for running in (0, 2))
    responses: dict[str, Any] = {f"/api/nodes/b/{verb}": empty for verb in ("cordon", "uncordon", "drain")}
    async with Gateway({**responses, "/api/nodes/busy/drain": busy}).serving() as gateway:
        outputs = [await run(verb, "b", "-e", f"{gateway.url}/") for verb in ("cordon", "uncordon", "drain")]
        unfinished = await run("drain", "busy", "-e", gateway.url)
        refused = await run("cordon", "../x", "-e", gateway.url)
    assert [(code, err) for code, _, err in outputs] == [(0, "")] * 3
    assert "b is cordoned" in outputs[0][1]
    assert "b is drained" in outputs[2][1]
    assert unfinished == (
        1,
        "",
        "cortex: busy is cordoned, but 2 requests and 0 loads are still running; "
        "run the command again to wait longer\n",
    )
    assert refused == (1, "", f"cortex: {gateway.url}/api/nodes/..%2Fx/cordon: there is no such thing\n")
    assert gateway.requests[0] == ("POST", "/api/nodes/b/cordon", None)


async def test_api_key_is_not_sent_to_a_redirect_target() -> None:
    async with Gateway({}).serving() as elsewhere:
        moved = web.Response(status=302, headers={"Location": f"{elsewhere.url}/api/activity"})
        async with Gateway({"/api/activity": moved}).serving() as gateway:
            code, out, err = await run("top", "--once", "-e", gateway.url, "--key", "s3cret")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "302" in err and "s3cret" not in err
    assert elsewhere.requests == []
    assert "s3cret" not in repr(GatewayApi("http://h", "s3cret"))


@pytest.mark.parametrize("command", [("explain", "m"), ("top", "--once")])
async def test_response_of_a_server_that_is_no_gateway_is_reported_in_one_line(command: tuple[str, ...]) -> None:
    for content in ([], {"requests": [{}]}, {"requests": 5}, {}):
        async with Gateway({"/api/explain": content, "/api/activity": content}).serving() as gateway:
            code, out, err = await run(*command, "-e", gateway.url)
        assert (code, out, err.count("\n")) == (1, "", 1)
    code, out, err = await run(*command, "-e", gateway.url)
    assert (code, out, err.count("\n")) == (3, "", 1)
    code, out, err = await run(*command, "-e", "file:///etc/passwd#")
    assert (code, out, err.count("\n")) == (3, "", 1)


async def test_check_command_prints_a_summary_of_the_configuration_and_warnings(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(
        '[[models]]\nid = "Org/M"\npinned_on = ["gone"]\n[aliases]\nsmall = "Org/M"\n'
    )
    path = tmp_path / "cortex.toml"
    path.write_text(
        'models_config = "models.toml"\n'
        '[[entitlements.keys]]\nkey = "s3cret"\naccount_id = "a"\nmodels = ["small"]\n'
        '[[neurons]]\nname = "beast"\nendpoint = "http://h:1"\n'
    )
    code, out, err = await run("check", "-c", str(path), "--no-probe")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{path} is valid",
        "  listens on 127.0.0.1:31313, metrics on 127.0.0.1:31314",
        "  keys are not required; 1 in this file, further keys in the ledger",
        f"  1 models and 1 aliases in {tmp_path / 'models.toml'}",
        "  node beast: http://h:1",
        "warning: model 'Org/M' is pinned on gone, which is not a configured node",
        "warning: key 'a' allows 'small', an alias; write the model id 'Org/M'",
    ]


async def list_models(request: web.Request) -> web.Response:
    if request.headers.get("authorization") != "Bearer right":
        return web.json_response({"detail": "Unauthorized"}, status=401)
    return web.json_response({"object": "list", "data": [{"id": "m"}]})


NODE = '[[neurons]]\nname = "{name}"\nendpoint = "{url}"\nkind = "{kind}"\nbearer = "{key}"\n'


async def test_check_command_explains_how_to_fix_each_unreachable_node(tmp_path: Path) -> None:
    app = web.Application()
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/api/paas/v4/models", list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    nodes = {
        "good": (f"{url}/v1/", "openai", "right"),
        "kind": (url, "neuron", "right"),
        "path": (f"{url}/api", "openai", "right"),
        "key": (url, "openai", "wrong"),
        "down": (f"http://127.0.0.1:{free_port()}", "openai", "right"),
    }
    path = tmp_path / "cortex.toml"
    (tmp_path / "models.toml").touch()
    tables = [NODE.format(name=name, url=url, kind=kind, key=key) for name, (url, kind, key) in nodes.items()]
    path.write_text('models_config = "models.toml"\n' + "".join(tables))
    try:
        code, out, err = await run("check", "-c", str(path))
    finally:
        await runner.cleanup()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert f"  node good: {url}, openai, lists 1 models" in lines
    warnings = {name: line for line in lines for name in nodes if line.startswith(f"warning: node '{name}'")}
    assert set(warnings) == set(nodes) - {"good"}
    assert warnings["kind"].endswith('set kind = "openai"')
    assert warnings["path"].endswith(f'set endpoint = "{url}"')
    assert warnings["key"].endswith("HTTP 401; the bearer in the configuration is not the node's API key")
    assert warnings["down"].endswith(f"connection refused at {nodes['down'][0]}; check that the node runs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gateway]\nlistn = 1", "did you mean 'listen'?"),
        ('[gateway]\nlisten = "0.0.0.0:1"', "--insecure"),
        ('[[entitlements.keys]]\nkey = ""\naccount_id = "a"', "is empty"),
        ('models_config = "cortex.toml"', "unknown key 'models_config'"),
    ],
)
async def test_check_command_prints_the_configuration_error_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text(text)
    code, out, err = await run("check", "-c", str(path))
    assert (code, out, err.count("\n")) == (78, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("24h", 86400), ("30d", 2592000), ("2w", 1209600)]
)
def test_durations_are_parsed_in_seconds_minutes_hours_days_and_weeks(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5", "0s", "-1d", "1.5h", "1y", "٣d", "1 d", "1000000s"])
def test_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(HelexaError):
        parse_duration(text)


@given(st.integers(1, 999_999))
def test_printed_duration_is_parsed_back_to_the_same_value(seconds: int) -> None:
    assert parse_duration(duration_text(seconds)) == seconds
