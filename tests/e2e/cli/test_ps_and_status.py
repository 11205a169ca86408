"""`helexa ps` and `helexa status`."""

import json

import pytest

SMALL = {"id": "helexa/small", "status": "loaded", "limit": {"context": 8192}, "servable": {"ok": True}}
SMALL |= {"vram_used_mb": 812, "granted_mb": 1536}
WIDE = {"id": "org/wide", "status": "loaded", "tensor_parallel": 2, "servable": {"ok": True}}
SICK = {"id": "org/sick", "status": "loaded", "servable": {"ok": False, "reason": "engine_down", "detail": "it ended"}}
DRAFTS = {"model_drafts_total": 50, "accepted_model_drafts_total": 46, "draft_gain": 1.21}
LOAD = {
    "id": "helexa/small",
    "saved_prompts_mb": 512,
    "in_flight": 2,
    "queue_depth": 1,
    "tok_s_decode": 41.25,
    **DRAFTS,
}
ACTIVATION = {
    "state": "pre_warming",
    "in_progress": "org/next",
    "stage": "download",
    "progress": 0.43,
    "pending": ["org/later"],
    "failed": [{"model_id": "org/broken", "error": "the file is\ntruncated"}],
}
DISCOVERY = {"hostname": "beast", "os": "Linux", "cpu_cores": 8, "memory_total_mb": 65536}
NODE = {
    "name": "beast",
    "endpoint": "http://10.0.0.1:13131",
    "healthy": True,
    "models": [SMALL, WIDE, SICK],
    "load": [LOAD],
    "activation": ACTIVATION,
    "discovery": DISCOVERY,
    "unload_at": {"helexa/small": 1000},
    "memory_free_mb": 11264,
}


def test_ps_prints_a_table_of_models_and_their_states(helexa, gateway):
    gateway.nodes = [NODE, {"name": "attic", "healthy": False, "models": [{"id": "org/old"}]}]
    result = helexa("ps", "--url", gateway.url)
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split("  ") for line in result.stdout.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells == [
        [
            "MODEL",
            "NODE",
            "STATE",
            "SIZE",
            "SAVED",
            "DEVICE",
            "CONTEXT",
            "IN FLIGHT",
            "WAITING",
            "TOK/S",
            "DRAFTS",
            "UNLOADS",
        ],
        [
            "helexa/small",
            "beast",
            "loaded",
            "1.50 GB",
            "512 MB",
            "cpu",
            "8192",
            "2",
            "1",
            "41.2",
            "1.21x (92%)",
            "in 0 s",
        ],
        ["org/wide", "beast", "loaded", "-", "-", "cpu x2", "-", "-", "-", "-", "-", "-"],
        ["org/sick", "beast", "engine_down", "-", "-", "cpu", "-", "-", "-", "-", "-", "-"],
        ["org/next", "beast", "download 43%", "-", "-", "-", "-", "-", "-", "-", "-", "-"],
        ["org/later", "beast", "pending", "-", "-", "-", "-", "-", "-", "-", "-", "-"],
        ["org/broken", "beast", "failed", "-", "-", "-", "-", "-", "-", "-", "-", "-"],
        ["org/old", "attic", "node down", "-", "-", "-", "-", "-", "-", "-", "-", "-"],
    ]


def test_ps_as_json_has_the_state_of_each_model(helexa, gateway):
    gateway.nodes = [NODE]
    rows = json.loads(helexa("ps", "--json", "--url", gateway.url).stdout)
    assert rows[0] == {
        "model": "helexa/small",
        "node": "beast",
        "state": "loaded",
        "memory_mb": 1536,
        "saved_prompts_mb": 512,
        "device": "cpu",
        "ranks": None,
        "context": 8192,
        "in_flight": 2,
        "waiting": 1,
        "tok_s": 41.25,
        "draft_acceptance": 0.92,
        "draft_gain": 1.21,
        "unload_at": 1000,
    }
    assert (rows[1]["ranks"], rows[1]["tok_s"]) == (2, None)


def test_ps_of_a_gateway_without_nodes_prints_a_note_on_stderr(helexa, gateway):
    result = helexa("ps", "--url", gateway.url)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "the gateway has no nodes\n")


def test_status_describes_nodes_and_models_as_text(helexa, gateway):
    gateway.nodes = [NODE, {"name": "attic", "endpoint": "http://10.0.0.2:13131", "models": [{"id": "org/old"}]}]
    gateway.health = {"status": "impaired"}
    assert helexa("status", "--url", gateway.url).stdout.splitlines() == [
        f"gateway {gateway.url}: serving, but some models cannot answer; 1 of 2 nodes answer",
        "",
        "beast (http://10.0.0.1:13131): answers, no accelerator, 8 CPU cores, 11.0 GB free of 64.0 GB of memory",
        "  helexa/small: loaded, answering 2, 1 waiting",
        "  org/wide: loaded on 2 ranks, idle",
        "  org/sick: cannot answer (it ended)",
        "  org/next: download, 43% done",
        "  org/later: waits to be loaded",
        "  org/broken: could not be loaded: the file is truncated",
        "",
        "attic (http://10.0.0.2:13131): does not answer",
        "  org/old: out of reach",
    ]


def test_status_shows_the_free_memory_of_accelerators(helexa, gateway):
    device = {"index": 0, "name": "RTX 5090", "vram_total_mb": 32768}
    live = {"index": 0, "vram_used_mb": 8192, "vram_free_mb": 24576}
    gateway.nodes = [NODE | {"discovery": DISCOVERY | {"devices": [device]}, "devices": [live]}]
    assert "RTX 5090 with 24.0 GB free of 32.0 GB" in helexa("status", "--url", gateway.url).stdout


def test_status_as_json_has_health_and_nodes(helexa, gateway):
    gateway.nodes = [NODE]
    report = json.loads(helexa("status", "--json", "--url", gateway.url).stdout)
    assert report["health"]["status"] == "ok"
    assert report["nodes"][0]["models"][0]["id"] == "helexa/small"


@pytest.mark.parametrize("command", ["ps", "status"])
@pytest.mark.parametrize("nodes", [None, "x", [{"models": []}], [{"name": "n", "load": 3}]])
def test_invalid_gateway_response_is_an_error(helexa, gateway, command, nodes):
    gateway.nodes = nodes
    result = helexa(command, "--url", gateway.url)
    assert (result.returncode, result.stdout) == (1, "")
    assert "check that the URL is that of a helexa gateway" in result.stderr


@pytest.mark.parametrize("command", ["ps", "status"])
def test_control_characters_in_names_are_removed(helexa, gateway, command):
    gateway.nodes = [{"name": "no\x1b]0;x\x07de", "healthy": True, "models": [{"id": "org/model"}]}]
    shown = helexa(command, "--url", gateway.url).stdout
    assert "no]0;xde" in shown
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(shown)


@pytest.mark.parametrize("command", ["ps", "status"])
def test_model_id_with_control_characters_makes_ps_and_status_print_a_one_line_error(helexa, gateway, command):
    gateway.nodes = [{"name": "node", "healthy": True, "models": [{"id": "org/\x9bm\rodel"}]}]
    done = helexa(command, "--url", gateway.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(done.stderr)
