"""The command as a whole: what it imports, what it says of mistakes, and how it ends."""

import json
import subprocess
import sys

import pytest

NOWHERE = "http://127.0.0.1:1"
HEAVY = ("torch", "pydantic", "aiohttp", "numpy", "starlette", "httptools")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_first_words_import_nothing_heavy(environ, option):
    code = (
        "import sys\n"
        f"sys.argv = ['helexa', '{option}']\n"
        "from helexa.cli import main\n"
        "try: main()\n"
        "finally: print('IMPORTED', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    imported = done.stdout.partition("IMPORTED")[2].split()
    assert "cyclopts" in imported
    assert not set(HEAVY) & set(imported)


def test_help_names_every_verb(helexa):
    done = helexa("--help")
    assert done.returncode == 0
    verbs = ("up", "generate", "run", "chat", "pull", "list (ls)", "show", "rm", "ps", "status", "doctor", "completion")
    assert all(f" {verb} " in done.stdout for verb in verbs)
    assert all(option in done.stdout for option in ("--version", "--debug"))


def test_version(helexa):
    import helexa as package

    assert helexa("--version").stdout == f"helexa {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["upp"], '"up"'),
        (["ps", "--nope"], "--nope"),
        (["up", "--port", "99999"], "--port"),
        (["chat", "--seed", "x"], "--seed"),
        (["ps", "--url", "ftp://example.org"], "ftp://example.org"),
        (["ps", "--url", "http://[::1"], "not a URL"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(helexa, arguments, word):
    done = helexa(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("helexa: ")
    assert word in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["ps", "status", "chat"])
def test_nobody_there(helexa, verb):
    done = helexa(verb, "--url", NOWHERE, stdin="hello")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"helexa: no gateway at {NOWHERE}; start one with `helexa up`\n"


def test_doctor_says_what_models_run_on_and_why(helexa, tmp_path):
    nowhere = {"PATH": "/nonexistent", "CC": "/nonexistent/cc", "HF_HUB_OFFLINE": "1"}
    done = helexa("doctor", "--json", HELEXA_CACHE=str(tmp_path), HELEXA_FORCE_F32="1", **nowhere)
    assert (done.returncode, done.stderr) == (0, "")
    texts = [finding["text"] for finding in json.loads(done.stdout)["findings"]]
    (chosen,) = [text for text in texts if text.startswith("models run on ")]
    assert " in float32 (" in chosen
    assert not [text for text in texts if "free to listen on" in text]
    done = helexa("doctor", HELEXA_DEVICE="cuda:9", HELEXA_CACHE=str(tmp_path), **nowhere)
    assert done.returncode == 1
    assert "FAULT: " in done.stdout


def test_debug_shows_the_traceback(helexa):
    assert "Traceback" in helexa("ps", "--debug", "--url", NOWHERE).stderr
    assert "Traceback" not in helexa("ps", "--url", NOWHERE).stderr


def test_a_key_that_cannot_be_sent_is_not_shown(helexa):
    done = helexa("ps", HELEXA_API_KEY="sécret\n")
    assert done.returncode == 2
    assert "HELEXA_API_KEY" in done.stderr
    assert "cret" not in done.stderr


def test_a_reader_that_leaves_early(environ, gateway):
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
