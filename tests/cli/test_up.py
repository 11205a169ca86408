"""`helexa up`: what it refuses to start, and that what it started ends with it, however it ends."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import uuid
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from helexa.cli.commands import up
from helexa.cli.failure import CommandError
from helexa.cli.gateway import Gateway
from helexa.cli.local.api_key import generated_key
from helexa.cli.local.local_config import LocalConfig, LocalModel
from helexa.core.fleet import Activation
from helexa.neuron.processes.file_use import is_used


@pytest.fixture
def ports():
    """Options that name three free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        numbers = [str(one.getsockname()[1]) for one in sockets]
    return ["--port", numbers[0], "--metrics-port", numbers[1], "--neuron-port", numbers[2]]


@pytest.fixture
def started(environ):
    """Start `helexa up`; whatever it leaves behind is found and killed afterwards."""
    mark = f"HELEXA_TEST_RUN={uuid.uuid4()}"
    name, value = mark.split("=")

    def start(*arguments, **variables):
        return subprocess.Popen(
            [sys.executable, "-m", "helexa", "up", *arguments],
            env=environ | {name: value} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    start.running = lambda: running(mark.encode())
    yield start
    for pid in running(mark.encode()):
        os.kill(pid, signal.SIGKILL)


def running(mark):
    """The processes that have `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended, or is not ours
    return found


def until(condition, seconds=60):
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_until(stream, text):
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} was not in {''.join(lines)!r}")


@pytest.mark.parametrize("option", ["--port", "--metrics-port", "--neuron-port"])
def test_a_port_in_use(helexa, environ, ports, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        ports[ports.index(option) + 1] = number
        done = helexa("up", *ports)
    assert (done.returncode, done.stdout) == (1, "")
    hint = f"port {number} is already in use; stop what listens there, or choose another with {option}"
    assert done.stderr == f"helexa: {hint}\n"
    assert not Path(environ["XDG_STATE_HOME"]).exists()


def test_the_same_port_twice(helexa):
    done = helexa("up", "--port", "4000", "--metrics-port", "4000")
    assert done.returncode == 2
    assert done.stderr == "helexa: --port and --metrics-port are both 4000; they need different ports\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/name"], "'no/such/name' is not a model source"),
        (["--model", "./missing.gguf"], "missing.gguf: no such file"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--host", "a..b"], "cannot listen on a..b: there can be no such host"),
    ],
)
def test_what_cannot_work_is_refused_at_once(helexa, ports, arguments, message):
    done = helexa("up", *ports, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_two_models_of_one_name(helexa, ports, tmp_path):
    files = [tmp_path / folder / "tiny.gguf" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.touch()
    done = helexa("up", *ports, "--model", str(files[0]), "--model", str(files[1]))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "helexa: two models would both be called 'tiny'; start one of them, or rename its file\n"


def test_any_name_can_be_written_to_the_configuration(tmp_path):
    model = LocalModel('a "b" \\ é 😀', "file:/models/😀.gguf")
    files = LocalConfig((model,), "127.0.0.1", 1, 2, 3).write(tmp_path)
    names = [tomllib.loads(file.read_text(encoding="utf-8")) for file in (files[0], tmp_path / "models.toml")]
    assert names[0]["default_models"] == [{"model_id": model.id, "source": model.source}]
    assert names[1]["models"] == [{"id": model.id, "source": model.source}]


def test_without_the_engine(environ):
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['helexa', 'up']; from helexa.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'helexa[neuron]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_serves_and_ctrl_c_ends_all_of_it(started, helexa, ports, smollm2_gguf):
    process = started("--model", str(smollm2_gguf), *ports)
    with process:
        shown = read_until(process.stdout, "Ctrl-C")
        url = f"http://127.0.0.1:{ports[1]}"
        assert f"base URL  {url}/v1" in shown
        assert f"helexa chat --url {url}" in shown
        (curl,) = [line.strip() for line in shown.splitlines() if line.strip().startswith("curl ")]
        assert smollm2_gguf.stem in curl
        listed = helexa("ps", "--url", url).stdout.splitlines()
        assert listed[1].split()[:3] == [smollm2_gguf.stem, "local", "loaded"]
        assert is_used(smollm2_gguf)
        asked = helexa("chat", "Say hello.", "--max-tokens", "4", "--url", url)
        assert asked.returncode == 0
        assert asked.stdout.strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read().splitlines()[-1] == "stopping"
    until(lambda: not started.running())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_killed_it_leaves_no_orphans(started, ports, smollm2_gguf):
    with started("--model", str(smollm2_gguf), "--host", "0.0.0.0", "--insecure", *ports) as process:
        assert f"base URL  http://127.0.0.1:{ports[1]}/v1" in read_until(process.stdout, "Ctrl-C")
        read_until(process.stderr, f"--insecure: the gateway serves everyone who can reach 0.0.0.0 port {ports[1]}")
        assert len(started.running()) > 2
        process.kill()
        process.wait()
        until(lambda: not started.running())


def test_up_on_the_network_prints_a_generated_key_and_serves_only_with_the_key(
    started, helexa, environ, ports, smollm2_gguf
):
    url = f"http://127.0.0.1:{ports[1]}"
    with started("--model", str(smollm2_gguf), "--host", "0.0.0.0", *ports) as process:
        shown = read_until(process.stdout, "Ctrl-C")
        key = re.search(r"API key   (hlx_\w{43})\n", shown)[1]
        assert f"export HELEXA_API_KEY={key}\n" in shown
        assert '-H "Authorization: Bearer $HELEXA_API_KEY"' in shown
        refused = helexa("chat", "Say hello.", "--url", url)
        assert refused.returncode != 0
        assert "API key" in refused.stderr
        assert helexa("ps", "--url", url, HELEXA_API_KEY=key).returncode == 0
        folder = Path(environ["XDG_STATE_HOME"], "helexa", "up", ports[1])
        assert [(folder / name).stat().st_mode & 0o777 for name in ("api_key", "cortex.toml")] == [0o600, 0o600]
        process.terminate()
        assert process.wait(60) == 0
    until(lambda: not started.running())


def test_generated_key_stays_the_same(tmp_path):
    key = generated_key(tmp_path)
    assert generated_key(tmp_path) == key
    (tmp_path / "api_key").write_text("")
    with pytest.raises(CommandError, match="holds no API key; remove it"):
        generated_key(tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_key_replaces_insecure_on_hosts_that_other_machines_can_reach(tmp_path, host):
    config = LocalConfig((), host, 1, 2, 3, "secret-key")
    written = tomllib.loads(config.write(tmp_path)[1].read_text(encoding="utf-8"))
    assert not written["gateway"]["insecure"]
    assert written["entitlements"]["require_auth"]
    assert [entry["key"] for entry in written["entitlements"]["keys"]] == ["secret-key"]
    assert config.environment({"CORTEX_ENTITLEMENTS__REQUIRE_AUTH": "false", "HOME": "/"}) == {"HOME": "/"}
    assert LocalConfig((), host, 1, 2, 3).is_open


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_hosts_need_no_key(host):
    assert not LocalConfig((), host, 1, 2, 3).is_open


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", ""], "--api-key must have 8 to 512 characters"),
        (["--api-key", "any"], "--api-key must have 8 to 512 characters"),
        (["--api-key", "geheimnis-ü"], "--api-key must be printable ASCII without blanks"),
        (["--api-key", "long-enough", "--insecure"], "--insecure and --api-key contradict each other"),
    ],
)
def test_unusable_api_key_is_wrong_usage(helexa, ports, arguments, message):
    done = helexa("up", "--host", "0.0.0.0", *ports, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"helexa: {message}\n")


def test_sigterm_while_it_starts(started, ports, smollm2_gguf):
    with started("--model", str(smollm2_gguf), *ports) as process:
        until(lambda: len(started.running()) > 2)
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout.read() == ""
    until(lambda: not started.running())


def test_a_server_that_dies_takes_the_other_with_it(started, ports, smollm2_gguf):
    with started("--model", str(smollm2_gguf), *ports, CORTEX_ROUTING__AFFINITY="many") as process:
        assert process.wait(60) == 1
        lines = process.stderr.read().splitlines()
    assert any(line.startswith("cortex | ") and "CORTEX_ROUTING__AFFINITY" in line for line in lines)
    assert lines[-1].startswith("helexa: cortex ended with exit code 1; its log is ")
    assert not started.running()


def test_a_model_that_cannot_be_loaded(started, ports, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    with started("--model", str(damaged), *ports) as process:
        assert process.wait(60) == 1
        assert process.stdout.read() == ""
        assert "helexa: could not load damaged: " in process.stderr.read()
    assert not started.running()


def test_verbose_shows_both_logs(started, ports, smollm2_gguf, tmp_path):
    logs = tmp_path / "logs"
    with started("--verbose", "--log-dir", str(logs), "--model", str(smollm2_gguf), *ports) as process:
        read_until(process.stderr, "cortex | ")
        read_until(process.stderr, "neuron | ")
        process.terminate()
        assert process.wait(60) == 0
    assert {file.name for file in logs.iterdir()} == {"neuron.log", "cortex.log"}


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("refused", flush=True))
print("ready", flush=True)
while True:
    time.sleep(60)
"""

STACK = """
import os, sys
from pathlib import Path
from helexa.cli.local.stack import Stack
with Stack(dict(os.environ), verbose=True) as stack:
    stack.start("stubborn", [], Path(sys.argv[1]))
    while stack.watch():
        pass
"""


def test_the_second_ctrl_c_kills(environ, tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    path = os.pathsep.join([str(tmp_path), *filter(None, [environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", STACK, str(tmp_path / "log")]
    with subprocess.Popen(command, env=environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True) as process:
        read_until(process.stderr, "stubborn | ready")
        process.send_signal(signal.SIGINT)
        until(lambda: "refused" in (tmp_path / "log").read_text())
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "stubborn is being killed")
        assert process.wait(60) == 0


def test_node_that_misses_a_poll_after_a_long_load_is_waited_for(monkeypatch, tmp_path):
    """Each poll takes 40 s of a clock that only the polls advance."""
    polls = iter([Activation(state="pre_warming", in_progress="a")] * 3 + [None, Activation(completed=["a"])])
    seconds = itertools.count(0.0, 40.0)
    now = 0.0

    def poll(_node):
        nonlocal now
        now = next(seconds)
        return next(polls)

    monkeypatch.setattr(up, "_activation", poll)
    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: now))
    with up.Stack({}, verbose=False) as stack, up.Progress(plain=True) as progress:
        found = up._until_loaded(stack, Gateway("http://127.0.0.1:9"), progress, tmp_path / "neuron.log")
    assert found and found.completed == ["a"]
