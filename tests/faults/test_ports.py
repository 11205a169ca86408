"""A port that is taken: one line that names it, exit code 1."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def fails_in_one_line(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_of_the_node(taken: int):
    line = fails_in_one_line("helexa.neuron", "--host", "127.0.0.1", "--port", str(taken))
    assert line == f"neuron: port {taken} is in use by another process; choose another with --port\n"


@pytest.mark.parametrize("option", ["--listen", "--metrics-listen"])
def test_of_the_gateway(taken: int, option: str, tmp_path: Path):
    (tmp_path / "models.toml").touch()
    config = tmp_path / "cortex.toml"
    config.write_text(
        'models_config = "models.toml"\n[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n'
        '[[neurons]]\nname = "n1"\nendpoint = "http://127.0.0.1:9"\n'
    )
    line = fails_in_one_line("helexa.cortex", "serve", "-c", str(config), option, f"127.0.0.1:{taken}")
    assert line == f"cortex: cannot listen on 127.0.0.1:{taken}: Address already in use\n"
