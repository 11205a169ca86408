"""The `helexa` command: imports, usage errors and exit codes."""

import json
import subprocess
import sys

import pytest

NOWHERE = "http://127.0.0.1:1"
HEAVY = ("torch", "pydantic", "aiohttp", "numpy", "starlette", "httptools")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_options_help_and_version_import_no_slow_modules(environ, option):
    code = (
        "import sys\n"
        f"sys.argv = ['helexa', '{option}']\n"
        "from helexa.cli import main\n"
        "try: main()\n"
        "finally: print('IMPORTED', *sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    imported = result.stdout.partition("IMPORTED")[2].split()
    assert "cyclopts" in imported
    assert not set(HEAVY) & set(imported)


def test_help_names_every_command(helexa):
    result = helexa("--help")
    assert result.returncode == 0
    verbs = (
        "serve (up)",
        "node",
        "gateway",
        "smoke",
        "generate",
        "run",
        "chat",
        "pull",
        "list (ls)",
        "show",
        "rm",
        "ps",
        "status",
        "doctor",
        "completion",
    )
    assert all(f" {command} " in result.stdout for command in verbs)
    assert all(option in result.stdout for option in ("--version", "--debug"))


def test_version_is_printed(helexa):
    import helexa as package

    assert helexa("--version").stdout == f"helexa {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["upp"], '"up"'),
        (["ps", "--nope"], "--nope"),
        (["up", "--port", "99999"], "--port"),
        (["chat", "--seed", "x"], "--seed"),
        (["ps", "--url", "ftp://example.org"], "ftp://example.org"),
        (["ps", "--url", "http://[::1"], "not a URL"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(helexa, arguments, message):
    result = helexa(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("helexa: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["ps", "status", "chat"])
def test_error_of_an_unreachable_gateway_names_its_url(helexa, command):
    result = helexa(command, "--url", NOWHERE, stdin="hello")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == f"helexa: no gateway at {NOWHERE}; start one with `helexa up`\n"


def test_doctor_reports_the_chosen_device_and_dtype_and_fails_for_a_missing_device(helexa, tmp_path):
    nowhere = {"PATH": "/nonexistent", "CC": "/nonexistent/cc", "HF_HUB_OFFLINE": "1"}
    result = helexa("doctor", "--json", HELEXA_CACHE=str(tmp_path), HELEXA_FORCE_F32="1", **nowhere)
    assert (result.returncode, result.stderr) == (0, "")
    texts = [result["text"] for result in json.loads(result.stdout)["findings"]]
    (chosen,) = [text for text in texts if text.startswith("models run on ")]
    assert " in float32 (" in chosen
    assert not [text for text in texts if "free to listen on" in text]
    result = helexa("doctor", HELEXA_DEVICE="cuda:9", HELEXA_CACHE=str(tmp_path), **nowhere)
    assert result.returncode == 1
    assert "FAULT: " in result.stdout


def test_traceback_of_an_error_is_printed_only_with_the_debug_option(helexa):
    assert "Traceback" in helexa("ps", "--debug", "--url", NOWHERE).stderr
    assert "Traceback" not in helexa("ps", "--url", NOWHERE).stderr


def test_invalid_api_key_is_not_printed(helexa):
    result = helexa("ps", HELEXA_API_KEY="sécret\n")
    assert result.returncode == 2
    assert "HELEXA_API_KEY" in result.stderr
    assert "cret" not in result.stderr


def test_command_whose_stdout_is_closed_by_head_prints_no_error(environ, gateway):
    gateway.nodes = [{"name": f"node-{number}", "models": [{"id": f"org/{'m' * 500}"}]} for number in range(2000)]
    shown = subprocess.run(
        f"'{sys.executable}' -m helexa ps --url {gateway.url} | head -1",
        check=False,
        shell=True,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.startswith("MODEL")
    assert shown.stderr == ""
