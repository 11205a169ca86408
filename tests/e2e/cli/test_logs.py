"""`helexa logs`, and the size of the log files of `helexa up`."""

import os
import sys

import pytest

from helexa.cli import main, up_state_keys_and_logs
from helexa.cli.commands.logs import _Reader
from helexa.cli.up_state_keys_and_logs import limit_size, log_files


@pytest.fixture
def base(monkeypatch, tmp_path):
    """The state folder of all `helexa up`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "helexa" / "up"


@pytest.fixture
def logs(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["helexa", "logs", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def write(base, port, time, **contents):
    folder = base / str(port)
    folder.mkdir(parents=True)
    for name, text in contents.items():
        (folder / f"{name}.log").write_text(text)
        os.utime(folder / f"{name}.log", (time, time))


def test_logs_command_prints_the_last_lines_of_the_most_recent_servers(base, logs):
    write(base, 1000, 1.0, neuron="old\n", cortex="old\n")
    write(base, 2000, 2.0, neuron="a\nb\nc\nunfinished", cortex="d\x1b[31m\n")
    assert logs("-n", "2") == (0, "node | b\nnode | c\ngateway | d[31m\n", "")
    assert logs("gateway") == (0, "d[31m\n", "")
    assert logs("node", "--port", "1000") == (0, "old\n", "")


def test_logs_command_explains_that_no_helexa_up_has_written_a_log(base, logs):
    code, out, err = logs()
    assert (code, out) == (1, "")
    assert err == f"helexa: no `helexa up` has written a log to {base}; start one with `helexa up`\n"
    code, _, err = logs("--port", "7")
    assert code == 1
    assert "no `helexa up` on port 7 has" in err


def test_logs_follow_continues_after_log_rotation(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(up_state_keys_and_logs, "MAX_BYTES", 5)
    log = tmp_path / "neuron.log"
    with log.open("ab", buffering=0) as server:
        server.write(b"one\n")
        limit_size(log)
        assert not (tmp_path / "neuron.log.1").exists()
        reader = _Reader(log, "")
        reader.show_new()
        server.write(b"two\n")
        reader.show_new()
        limit_size(log)
        server.write(b"3\n")
        reader.show_new()
    assert capsys.readouterr().out == "one\ntwo\n3\n"
    assert log.read_bytes() == b"3\n"
    assert (tmp_path / "neuron.log.1").read_bytes() == b"one\ntwo\n"


def test_logs_command_finds_logs_in_another_folder_by_symbolic_links(base, logs, tmp_path):
    folder, other = base / "1000", tmp_path / "logs"
    folder.mkdir(parents=True)
    other.mkdir()
    log_files(folder, other)["node"].write_text("elsewhere\n")
    assert logs("node") == (0, "elsewhere\n", "")
    assert log_files(folder, folder)["node"] == folder / "neuron.log"
    (folder / "neuron.log").write_text("here\n")
    assert (other / "neuron.log").read_text() == "elsewhere\n"
    assert logs("node") == (0, "here\n", "")
