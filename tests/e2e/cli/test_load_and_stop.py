"""`helexa load`, `unload` and `stop`: names, errors, and the `helexa up` that they find."""

import subprocess
import sys

import pytest

from helexa.cli.commands.load_and_unload import unload
from helexa.cli.terminal_output_and_errors import CommandError
from helexa.cli.up_state_keys_and_logs import local_gateway, only_running, recorded, running_ups, state_folder

NODE = {"name": "beast", "healthy": True, "models": [{"id": "org/a", "granted_mb": 2048}, {"id": "org/b"}]}
NOT_FOUND = (404, {}, {"error": {"message": "model 'x' not found", "code": "model_not_found"}})


@pytest.fixture
def state(environ, monkeypatch):
    """Use the state folder of the commands in this process, without a configured server."""
    monkeypatch.setenv("XDG_STATE_HOME", environ["XDG_STATE_HOME"])
    for name in ("HELEXA_BASE_URL", "HELEXA_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_load_command_prints_the_node_and_the_memory_of_the_model(helexa, gateway):
    gateway.nodes = [NODE]
    result = helexa("load", "org/a", "--node", "beast", "--url", gateway.url)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "org/a is loaded on beast, 2.00 GB\n")
    assert gateway.requests == [{"model": "org/a", "node": "beast"}]


def test_load_error_for_a_model_that_no_node_has_names_the_download_command(helexa, gateway):
    gateway.model_answers["/api/models/load"] = NOT_FOUND
    result = helexa("load", "org/x", "--url", gateway.url)
    assert result.returncode == 4
    assert result.stderr == "helexa: model 'org/x' is on no node; download it with `helexa pull org/x`\n"


def test_failed_load_is_reported_in_one_line(helexa, gateway):
    reason = "no node has enough memory for model 'org/a': the model needs 61.5 GB; a has 11.0 GB free"
    gateway.model_answers["/api/models/load"] = (503, {"Retry-After": "30"}, {"error": {"message": reason}})
    result = helexa("load", "org/a", "--url", gateway.url)
    assert (result.returncode, result.stderr) == (1, f"helexa: {reason} (try again in 30 s)\n")


def test_unload_of_all_models_prints_each_model(gateway, capsys):
    gateway.nodes = [NODE]
    unload(all_models=True, url=gateway.url)
    assert capsys.readouterr().err == "org/a is unloaded\norg/b is unloaded\n"
    assert gateway.requests == [{"model": "org/a"}, {"model": "org/b"}]


def test_unload_of_an_unknown_model_lists_the_loaded_models(gateway):
    gateway.nodes = [NODE]
    gateway.model_answers["/api/models/unload"] = NOT_FOUND
    with pytest.raises(CommandError, match="'org/x' is not loaded; loaded models: org/a, org/b") as error:
        unload("org/x", url=gateway.url)
    assert error.value.exit_code == 4
    with pytest.raises(CommandError, match="no model is named; name the models to unload, or use --all") as error:
        unload(url=gateway.url)
    assert error.value.exit_code == 2


def test_commands_find_the_only_running_helexa_up_whatever_its_port(state):
    assert running_ups() == []
    assert local_gateway(None).url == "http://127.0.0.1:31313"
    configuration = '[gateway]\nlisten = "127.0.0.1:4001"\n[[entitlements.keys]]\nkey = "the-owners-key"\n'
    (state_folder("up", "4001") / "cortex.toml").write_text(configuration)
    assert "Authorization" not in local_gateway("http://127.0.0.1:4001")._headers  # another program may listen there
    with recorded(state_folder("up", "4001"), "http://127.0.0.1:4001"):
        assert local_gateway(None).url == "http://127.0.0.1:4001"
        assert local_gateway("http://127.0.0.1:4001")._headers["Authorization"] == "Bearer the-owners-key"
        with recorded(state_folder("up", "4002"), "http://127.0.0.1:4002"):
            with pytest.raises(CommandError, match=r"choose one with --url: http://127\.0\.0\.1:4001, http"):
                local_gateway(None)
            with pytest.raises(CommandError, match="choose one with --port: 4001, 4002"):
                only_running(None)
            assert only_running(4002).url == "http://127.0.0.1:4002"
            with recorded(state_folder("up", "31313"), "http://127.0.0.1:31313"):
                assert local_gateway(None).url == "http://127.0.0.1:31313"
    assert running_ups() == []


def test_console_command_finds_the_running_helexa_up(state, environ, gateway, helexa):
    environ.pop("HELEXA_BASE_URL", None)
    with recorded(state_folder("up", gateway.url.rpartition(":")[2]), gateway.url):
        result = helexa("console", HELEXA_API_KEY="an-admins-key")
    assert result.stdout.startswith(f"{gateway.url}/#/link/")


def test_state_file_left_by_a_killed_helexa_up_is_not_reported_as_running(state):
    code = "import signal; from helexa.cli.up_state_keys_and_logs import recorded"
    code += "; from helexa.cli.up_state_keys_and_logs import state_folder"
    code += "; up = recorded(state_folder('up', '4003'), 'http://127.0.0.1:4003'); up.__enter__()"
    command = [sys.executable, "-c", f"{code}; print('up', flush=True); signal.pause()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "up\n"
            assert [up.pid for up in running_ups()] == [process.pid]
        finally:
            process.kill()
    assert (state_folder("up", "4003") / "running.json").exists()
    assert running_ups() == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["stop"], 3, "no `helexa up` of this user runs on this machine"),
        (["stop", "--port", "4000"], 3, "no `helexa up` with port 4000 of this user runs on this machine"),
        (["stop", "--url", "http://127.0.0.1:1"], 2, "choose it with --port"),
        (["stop", "org/a", "--all"], 2, "choose the gateway with --url"),
        (["stop", "org/a", "--url", "http://127.0.0.1:1"], 3, "no gateway at http://127.0.0.1:1"),
    ],
)
def test_stop_without_a_running_helexa_up_is_explained_in_one_line(helexa, arguments, code, message):
    result = helexa(*arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_commands_need_no_writable_state_folder(helexa, gateway, tmp_path):
    (tmp_path / "file").touch()
    unusable = {"XDG_STATE_HOME": str(tmp_path / "file")}
    assert helexa("ps", "--url", gateway.url, **unusable).returncode == 0
    assert helexa("stop", **unusable).returncode == 3
