"""The programs `helexa`, `cortex`, `neuron` and `helexa-bench`: errors in one line, versions and exit codes."""

import sys

import pytest

from cli.canned_gateway import CannedGateway
from helexa.__main__ import main as start
from helexa.bench.cli import main as bench
from helexa.cli import app
from helexa.cli import main as helexa
from helexa.cli.misspellings import OTHER_WORDS
from helexa.core.command_line import run_program
from helexa.cortex.cli import main as cortex
from helexa.neuron.cli import main as neuron

PROGRAMS = {"helexa": helexa, "cortex": cortex, "neuron": neuron, "helexa-bench": bench}


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a program in this process, and returns the exit code, stdout and stderr."""

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as exit:
            PROGRAMS[name]()
        return exit.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("helexa", ["no-such-command"]),
        ("helexa", ["ps", "--nope"]),
        ("cortex", ["no-such-command"]),
        ("cortex", ["serve", "--nope"]),
        ("neuron", ["--nope"]),
        ("neuron", ["--port", "99999"]),
        ("helexa-bench", ["no-such-command"]),
    ],
)
def test_usage_error_of_each_program_is_one_line_that_refers_to_help(run, name, arguments):
    code, out, err = run(name, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"{name}: ")
    assert err.endswith(f" See {name} --help.\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["cortex", "neuron"])
def test_option_config_that_names_a_folder_is_explained_in_one_line(run, name, tmp_path):
    (tmp_path / f"{name}.toml").touch()
    command = ["serve"] if name == "cortex" else ["doctor"]
    code, out, err = run(name, *command, "--config", str(tmp_path))
    message = f"{name}: {tmp_path} is a folder; name a file in it: {tmp_path}/{name}.toml\n"
    assert (code, out, err) == (78, "", message)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("option", ["--version", "-V", "-v"])
def test_each_program_prints_its_version(run, name, option):
    assert run(name, option) == (0, run(name, "--version")[1], "")


@pytest.mark.parametrize("arguments", [["version"], ["gateway", "-V"], ["node", "-v"], ["config", "-V"], ["ps", "-V"]])
def test_version_options_of_helexa_commands_print_the_same_version(run, arguments):
    assert run("helexa", *arguments) == run("helexa", "--version")


def test_helexa_help_prints_the_help_of_the_named_command(run):
    assert run("helexa", "help") == run("helexa", "--help")
    assert run("helexa", "help", "gateway", "serve") == run("helexa", "gateway", "serve", "--help")


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("cp", "--served-model-name"),
        ("start", "`helexa up`"),
        ("remove", "`helexa rm`"),
        ("download", "`helexa pull`"),
        ("upp", 'did you mean "up"?'),
        ("stats", 'did you mean "status"?'),
        ("frobnicate", "the commands are serve, up, "),
    ],
)
def test_error_for_an_unknown_command_names_the_command_or_option_to_use(run, word, advice):
    code, _, err = run("helexa", word)
    assert code == 2
    assert err.startswith(f'helexa: unknown command "{word}"; ')
    assert advice in err
    assert "acp" not in err or word == "frobnicate"


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["run", "x", "--chat-template", "x.jinja"], "`helexa up` has this option"),
        (["run", "x", "-ngl", "99"], "--device cpu or --device cuda selects the device"),
        (["run", "-hf", "org/name"], "write the model as an argument"),
        (["generate", "hi", "--temp=0"], "write --temperature"),
    ],
)
def test_error_for_an_option_of_another_program_names_the_option_to_use(run, arguments, advice):
    code, _, err = run("helexa", *arguments)
    assert code == 2
    assert err.startswith("helexa: unknown option -")
    assert advice in err
    assert err.count("\n") == 1


def test_foreign_command_names_that_get_advice_are_not_helexa_commands():
    assert not OTHER_WORDS.keys() & set(app)


def test_unexpected_exception_prints_one_line_or_with_debug_a_traceback(monkeypatch, capsys):
    def broken(_):
        raise ValueError("two\nlines")

    monkeypatch.setattr(sys, "argv", ["helexa", "doctor"])
    with pytest.raises(SystemExit) as exit:
        run_program("helexa", broken)
    assert exit.value.code == 1
    assert capsys.readouterr().err == "helexa: internal error: ValueError: two lines (--debug shows where)\n"
    monkeypatch.setattr(sys, "argv", ["helexa", "doctor", "--debug"])
    with pytest.raises(ValueError, match="two"):
        run_program("helexa", broken)
    monkeypatch.setattr(sys, "argv", ["cortex", "serve"])
    with pytest.raises(ValueError, match="two"):
        run_program("cortex", broken, tracebacks=True)


def test_ctrl_c_during_the_imports_of_a_command_prints_no_traceback(monkeypatch):
    class Interrupting:
        def find_spec(self, name, path, target=None):
            if name == "helexa.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "helexa.cli")
    monkeypatch.delattr("helexa.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as exit:
        start()
    assert exit.value.code == 130


@pytest.mark.parametrize("command", [["helexa", "ps"], ["cortex", "status"]])
def test_error_for_a_missing_or_wrong_api_key_names_the_variable(run, monkeypatch, command):
    gateway = CannedGateway()
    gateway.key = "right"
    try:
        monkeypatch.delenv("HELEXA_API_KEY", raising=False)
        code, _, err = run(*command, "--url", gateway.url)
        assert code == 1
        assert err.endswith("; set HELEXA_API_KEY\n")
        monkeypatch.setenv("HELEXA_API_KEY", "wrong")
        assert run(*command, "--url", gateway.url)[2].endswith("; check HELEXA_API_KEY\n")
    finally:
        gateway.close()
