"""`helexa smoke` against a real node and gateway, and against servers that are not ready or answer nonsense."""

import json
import socket

import pytest

from clients.stack import Stack


@pytest.fixture(scope="module")
def stack(smollm2_gguf, tmp_path_factory):
    with Stack(smollm2_gguf, tmp_path_factory.mktemp("smoke")) as stack:
        yield stack


@pytest.mark.parametrize("server", ["gateway", "node"])
def test_smoke_passes_for_a_working_gateway_or_node(helexa, stack, server):
    url = stack.url if server == "gateway" else stack.node_url
    result = helexa("smoke", url)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["ok      ready", "ok      models", "ok      answer"]
    assert "Paris" in lines[2]


@pytest.mark.parametrize("server", ["gateway", "node"])
def test_smoke_fails_if_the_server_was_built_from_another_commit(helexa, stack, server):
    url = stack.url if server == "gateway" else stack.node_url
    result = helexa("smoke", url, "--expect-sha", "0000000", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["ok"]) == (1, False)
    assert [check["check"] for check in report["checks"] if not check["ok"]] == ["build"]


def test_smoke_with_an_unknown_model_exits_with_code_4(helexa, stack):
    result = helexa("smoke", stack.url, "--model", "org/none")
    assert result.returncode == 4
    assert "org/none" in result.stderr


def test_smoke_exits_with_code_3_if_nothing_listens_until_the_timeout(helexa):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    result = helexa("smoke", url, "--timeout", "1")
    assert (result.returncode, result.stdout) == (3, "")


def test_smoke_waits_for_a_server_that_hangs_up_while_it_starts(helexa, gateway):
    gateway.drops = 1
    gateway.error_response = (200, {}, {"choices": [{"message": {"content": "Paris"}}]})
    result = helexa("smoke", gateway.url)
    assert (result.returncode, result.stderr) == (0, "")


def test_smoke_exits_with_code_3_if_the_server_hangs_up_until_the_timeout(helexa, gateway):
    gateway.drops = 1000
    result = helexa("smoke", gateway.url, "--timeout", "1")
    assert (result.returncode, result.stdout) == (3, "")
    assert f"the connection to {gateway.url} broke" in result.stderr


def test_smoke_fails_with_the_reason_of_a_server_that_stays_unready(helexa, gateway):
    gateway.readiness = {"ready": False, "components": {"nodes": {"ready": False, "reason": "0 nodes"}}}
    result = helexa("smoke", "--url", gateway.url, "--timeout", "1")
    assert result.returncode == 1
    assert result.stdout.startswith("FAILED  ready:")
    assert result.stdout.endswith(": 0 nodes\n")


def test_smoke_fails_while_a_node_of_the_gateway_still_loads_models(helexa, gateway):
    gateway.nodes = [{"name": "beast", "healthy": True, "activation": {"state": "pre_warming"}}]
    result = helexa("smoke", gateway.url, "--timeout", "1")
    assert result.returncode == 1
    assert "beast still loads models" in result.stdout


def test_smoke_lists_failed_models_and_a_wrong_answer(helexa, gateway):
    failed = [{"model_id": "org/broken", "error": "the file is\ntruncated"}]
    gateway.nodes = [
        {"name": "beast", "healthy": True, "activation": {"failed": failed}},
        {"name": "attic", "healthy": False},
    ]
    gateway.health |= {"unservable": [{"node": "beast", "model": "org/sick", "reason": "engine_down"}]}
    gateway.error_response = (200, {}, {"choices": [{"message": {"content": "\x1b[31mbanana"}}]})
    result = helexa("smoke", gateway.url)
    assert result.returncode == 1
    assert result.stdout.splitlines()[1:] == [
        "FAILED  models: org/sick on beast: engine_down; attic: this node does not answer; "
        "org/broken on beast: the file is truncated",
        "FAILED  answer: warm/model answered '[31mbanana' to 'What is the capital of France? Answer with one word.'",
    ]


def test_smoke_rejects_a_server_that_is_not_helexa(helexa, gateway):
    gateway.readiness = {"status": "fine"}
    result = helexa("smoke", gateway.url)
    assert (result.returncode, result.stdout) == (1, "")
    assert "check that the URL is that of a helexa server" in result.stderr
