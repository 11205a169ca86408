"""`neuron join`: the files that it writes, and a real node that joins a real gateway."""

import asyncio
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually, running_cortex
from helexa.core.errors import ConfigError, HelexaError, UsageError
from helexa.neuron.config import read_config
from helexa.neuron.join import UnreachableError, accepts_key, is_running, prepare, restart
from ports import free_port

TOKEN = SecretStr("hlxjoin_token")


def prepared(path: Path, address: str | None = None, gateway: str = "http://127.0.0.1:31313"):
    return prepare(gateway, TOKEN, name=None, address=address, path=path)


def test_join_writes_a_key_that_only_its_owner_can_read(tmp_path):
    path = tmp_path / "neuron.toml"
    request, settings, changes = prepared(path)
    key = (tmp_path / "node.key").read_text().strip()
    assert (tmp_path / "node.key").stat().st_mode & 0o777 == 0o600
    assert path.read_text() == 'api_key_file = "node.key"\n'
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == request.key.get_secret_value() == key
    assert len(key) > 40
    assert request.url == "http://127.0.0.1:13131"
    assert len(changes) == 2
    assert key not in repr(request) + "".join(changes)


def test_second_join_with_the_same_configuration_changes_nothing(tmp_path):
    path = tmp_path / "neuron.toml"
    first, *_ = prepared(path)
    text = path.read_text()
    second, _, changes = prepared(path)
    assert (changes, path.read_text(), second) == ([], text, first)


def test_join_keeps_a_configured_api_key_and_host(tmp_path):
    path = tmp_path / "neuron.toml"
    path.write_text('host = "0.0.0.0"\napi_key = "my-own-key"\nport = 9000\n')
    request, _, changes = prepared(path, "http://10.0.0.5:9000")
    assert (request.key.get_secret_value(), request.url, changes) == ("my-own-key", "http://10.0.0.5:9000", [])
    assert not (tmp_path / "node.key").exists()


TEXT = """\
# Configuration of the node.
host = '127.0.0.1'                  # a comment
port = 13131

[harness.torch]
threads = 2

[[default_models]]
model_id = "helexa/small"
"""


def test_join_command_inserts_lines_above_the_toml_tables_and_keeps_comments(tmp_path):
    path = tmp_path / "neuron.toml"
    path.write_text(TEXT)
    path.chmod(0o640)
    prepared(path, "http://node.example:13131")  # a name: the node listens on all addresses
    assert path.read_text() == TEXT.replace("host = '127.0.0.1'", 'host = "0.0.0.0"').replace(
        "port = 13131\n", 'port = 13131\napi_key_file = "node.key"\n'
    )
    assert path.stat().st_mode & 0o777 == 0o640
    assert read_config(path).default_models[0].model_id == "helexa/small"


def test_join_leaves_a_configuration_that_cannot_be_edited_unchanged(tmp_path):
    path = tmp_path / "neuron.toml"
    text = 'allowed_hosts = [\n["a"][0],\n]\n'
    path.write_text(text)
    with pytest.raises(ConfigError):
        prepared(path)
    assert path.read_text() == text
    text = 'allowed_hosts = [\n  "a",\n  """\n[x]""",\n]\nhost = """127.0.0.1"""\n'
    path.write_text(text)
    with pytest.raises(ConfigError, match="write these lines into the file, above all tables: "):
        prepared(path, "http://10.0.0.5:13131")
    assert path.read_text() == text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["neuron.toml", "node.key"]


@pytest.mark.parametrize(
    ("gateway", "kind", "message"),
    [
        ("http://8.8.8.8:31313", UsageError, "use https"),
        ("8.8.8.8", UsageError, "not a URL"),
        ("http://no-such-host.invalid", UnreachableError, "cannot be reached"),
    ],
)
def test_join_with_an_unusable_gateway_url_changes_no_file(tmp_path, gateway, kind, message):
    with pytest.raises(kind, match=message):
        prepared(tmp_path / "neuron.toml", gateway=gateway)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "message"), [("missing", "missing does not exist; create it"), ("file", "cannot be written")]
)
def test_error_of_join_names_the_file_that_cannot_be_written(tmp_path, folder, message):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path / folder / "neuron.toml")


def command(tmp_path: Path, url: str, token: str, port: int) -> subprocess.Popen[str]:
    environment = os.environ | {"HELEXA_JOIN_TOKEN": token, "NEURON_PORT": str(port)}
    arguments = [sys.executable, "-m", "helexa.neuron", "join", url, "--name", "alpha"]
    return subprocess.Popen(
        arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


async def test_node_joins_serves_and_joins_again_while_it_runs(tmp_path):
    port = free_port()
    async with running_cortex(ready=False) as cortex:
        store = cortex.gateway.node_store
        _, token = await store.invite(600)
        with command(tmp_path, cortex.url, token.get_secret_value(), port) as node:
            try:
                await eventually(lambda: cortex.gateway.fleet.is_alive("alpha"))
                await store.remove("alpha")
                await eventually(lambda: not cortex.gateway.fleet.view().nodes)
                _, token = await store.invite(600)
                again = command(tmp_path, cortex.url, token.get_secret_value(), port)
                await eventually(lambda: again.poll() is not None)
                assert (again.returncode, again.communicate()[0]) == (
                    0,
                    f"joined {cortex.url} as alpha, at http://127.0.0.1:{port}\n",
                )
            finally:
                node.send_signal(signal.SIGTERM)
            assert node.wait(60) == 0


async def test_node_whose_join_is_rejected_exits_with_the_reason(tmp_path):
    async with running_cortex(ready=False) as cortex:
        node = command(tmp_path, cortex.url, "hlxjoin_wrong", free_port())
        await eventually(lambda: node.poll() is not None)
        _, errors = node.communicate()
    assert node.returncode == 1
    assert "did not add this node: the token is wrong, used or expired" in errors
    assert "hlxjoin_wrong" not in errors


@pytest.fixture
def systemctl(tmp_path, monkeypatch):
    """A program `systemctl` that runs units as this user, and writes its calls to a file."""
    folder = tmp_path / "programs"
    folder.mkdir()
    program = folder / "systemctl"
    user = pwd.getpwuid(os.getuid()).pw_name
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n[ "$1" = show ] && echo {user}\n[ "$2" != broken ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "calls"


async def test_join_lets_the_service_user_read_the_key_and_restarts_the_service(tmp_path, systemctl):
    path = tmp_path / "neuron.toml"
    path.write_text(f"port = {free_port()}\n")
    _, settings, _ = prepare("http://127.0.0.1:1", TOKEN, name=None, address=None, path=path, service="neuron")
    key = tmp_path / "node.key"
    assert key.stat().st_mode & 0o777 == 0o640
    assert key.stat().st_gid == pwd.getpwuid(os.getuid()).pw_gid
    async with FakeNode(key=key.read_text().strip()).serving(settings.port):
        await asyncio.to_thread(restart, "neuron", settings)
        assert "restart neuron" in systemctl.read_text()
        with pytest.raises(HelexaError, match="systemctl restart broken failed"):
            await asyncio.to_thread(restart, "broken", settings)
        settings.api_key = SecretStr("another key")
        assert is_running(settings)
        assert not await asyncio.to_thread(accepts_key, settings)
