"""A node that requires a key, and a gateway that sends the key, as processes that read the key from files."""

import urllib.error
from pathlib import Path

import pytest

from clients.stack import Server, get
from ports import free_port

KEY = "node-secret-1"
WRONG_KEY = "node-secret-2"
DEBUG = {"HELEXA_LOG": "debug"}


def test_gateway_uses_the_changed_key_file_of_a_node_without_a_restart(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "node.key").write_text(f"{KEY}\n")
    (tmp_path / "gateway.key").write_text(f"{WRONG_KEY}\n")
    (tmp_path / "neuron.toml").write_text(f'port = {port}\napi_key_file = "node.key"\n')
    (tmp_path / "cortex.toml").write_text(
        'models_config = "models.toml"\n'
        '[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\npoll_interval_secs = 0.2\n'
        f'[ledger]\nurl = "sqlite:{tmp_path}/cortex.db"\n'
        f'[[neurons]]\nname = "n1"\nendpoint = "http://127.0.0.1:{port}"\nbearer_file = "gateway.key"\n'
    )
    node = Server("helexa.neuron", ["--config", str(tmp_path / "neuron.toml")], tmp_path / "neuron.log", **DEBUG)
    cortex = Server("helexa.cortex", ["serve", "-c", str(tmp_path / "cortex.toml")], tmp_path / "cortex.log", **DEBUG)
    try:
        log = cortex.log
        cortex.until(lambda: "listening url=" in log.read_text(), "the gateway listens")
        url = log.read_text().partition("listening url=")[2].partition(" ")[0]

        def is_healthy() -> bool:
            (entry,) = get(f"{url}/api/nodes")["nodes"]
            return entry["healthy"]

        node.until(lambda: "status=401" in node.log.read_text(), "the node rejects the wrong key")
        assert not is_healthy()
        (tmp_path / "gateway.key").write_text(KEY)
        cortex.until(is_healthy, "the gateway sends the right key")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"http://127.0.0.1:{port}/models")
        assert get(f"http://127.0.0.1:{port}/models", KEY) == []
    finally:
        node.end()
        cortex.end()
    logs = node.log.read_text() + cortex.log.read_text()
    assert KEY not in logs
    assert WRONG_KEY not in logs
