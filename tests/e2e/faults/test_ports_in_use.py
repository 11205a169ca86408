"""A port in use: the commands print one line that names the port, and exit with code 1."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def fails_in_one_line(*command: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("\n") == 1
    return run.stderr


def test_node_reports_a_port_in_use(used_port: int):
    line = fails_in_one_line("helexa.neuron", "--host", "127.0.0.1", "--port", str(used_port))
    assert line == f"neuron: port {used_port} is in use by another process; choose another with --port\n"


@pytest.mark.parametrize("option", ["--listen", "--metrics-listen"])
def test_gateway_reports_a_port_in_use(used_port: int, option: str, tmp_path: Path):
    (tmp_path / "models.toml").touch()
    config = tmp_path / "cortex.toml"
    config.write_text(
        'models_config = "models.toml"\n[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n'
        '[[neurons]]\nname = "n1"\nendpoint = "http://127.0.0.1:9"\n'
    )
    line = fails_in_one_line("helexa.cortex", "serve", "-c", str(config), option, f"127.0.0.1:{used_port}")
    assert line == f"cortex: cannot listen on 127.0.0.1:{used_port}: Address already in use\n"
