"""Private engines: start, unload, restart, and end of the engine process with its parent."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import helexa
from neuron.fake_models import ENGINE, make_model

LOAD = """
import sys, threading, helexa
model = helexa.load(sys.argv[1], target="private")
print(model.open()._served().engine._child.pid, flush=True)
if sys.argv[2] == "wait":
    threading.Event().wait()
"""

AHEAD = """
import sys, helexa, psutil
from contextlib import suppress

def engines():
    return [child.pid for child in psutil.Process().children() if "fake_engine.py" in " ".join(child.cmdline())]

for model in sys.argv[1:]:
    with suppress(helexa.HelexaError):
        helexa.load(model, target="private")
    print(len(engines()), flush=True)
"""

FORK = """
import os, sys, helexa
print(helexa.generate("hi", target=sys.argv[1], model="m"), flush=True)
if (child := os.fork()) == 0:
    print(helexa.generate("hi", target=sys.argv[1], model="m"), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.fixture
def fake_engines(monkeypatch):
    """Start fake engine processes, which load no weights."""
    monkeypatch.setattr("helexa.neuron.engine_client.process_and_standby.COMMAND", ENGINE)


PATCHED = f"import helexa.neuron.engine_client.process_and_standby as child; child.COMMAND = {ENGINE!r}\n"


def started(model, action):
    """Start a process that loads a model into a fake engine; return the process and its engine process."""
    process = subprocess.Popen(
        [sys.executable, "-c", PATCHED + LOAD, str(model), action], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, psutil.Process(int(process.stdout.readline()))


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(60)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("action", "number"), [("leave", None), ("wait", signal.SIGKILL), ("wait", signal.SIGINT)])
def test_private_engine_ends_when_its_parent_process_ends(tmp_path, action, number):
    process, engine = started(make_model(tmp_path), action)
    with process:
        if number is not None:
            process.send_signal(number)
        process.wait(60)
        assert has_ended(engine)
        assert (process.returncode == 0) == (number is None)


def test_closed_model_is_unloaded_and_can_be_reopened(tmp_path, fake_engines):
    path = make_model(tmp_path)
    with helexa.load(str(path), target="private") as model:
        first_engine = psutil.Process(model.open()._served().engine._child.pid)
    assert has_ended(first_engine)
    assert model.open()._served().engine._child.pid != first_engine.pid
    model.close()


def test_private_model_stays_loaded_until_the_last_holder_closes_the_model(tmp_path, fake_engines):
    path = str(make_model(tmp_path))
    with helexa.load(path, target="private") as model:
        engine = psutil.Process(model.open()._served().engine._child.pid)
        with helexa.load(path, target="private", device="auto") as other_model:
            pass
        with helexa.load(path, target="private"):
            pass
        assert engine.is_running()
        assert model.open()._served().engine._child.pid == engine.pid
        assert other_model.open()._served().engine._child.pid != engine.pid  # other settings, another engine
    assert has_ended(engine)
    other_model.close()


def test_dead_private_engine_is_replaced_at_the_next_request(tmp_path, fake_engines):
    with helexa.load(str(make_model(tmp_path)), target="private") as model:
        target = model.open()
        first = target._served().engine._child.pid
        os.kill(first, signal.SIGKILL)
        while (served := target._served()) is not None and served.engine._child.pid == first:
            time.sleep(0.01)
        assert model.open()._served().engine._child.pid != first


def test_model_files_with_equal_names_in_two_folders_have_separate_engines(tmp_path, fake_engines):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    models = [helexa.load(str(make_model(folder)), target="private") for folder in folders]
    pids = {model.open()._served().engine._child.pid for model in models}
    assert len(pids) == 2
    for model in models:
        model.close()


def test_error_of_a_failed_load_names_the_cause(tmp_path, fake_engines):
    with pytest.raises(helexa.HelexaError, match="the file is truncated"):
        helexa.generate("hi", model=str(make_model(tmp_path, "bad-file")), target="private")
    with pytest.raises(helexa.HelexaError, match="no such file"):
        helexa.generate("hi", model=str(tmp_path / "nowhere.gguf"), target="private")
    with pytest.raises(helexa.HelexaError, match="not a model source"):
        helexa.generate("hi", model="what is this", target="private")


def test_failed_load_leaves_no_engine_process(tmp_path):
    models = ["what is this", str(tmp_path / "nowhere.gguf"), str(make_model(tmp_path, "bad-file"))]
    models.append(str(make_model(tmp_path)))
    run = subprocess.run(
        [sys.executable, "-c", PATCHED + AHEAD, *models], check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert run.stdout.split() == ["0", "0", "0", "1"]


def test_generation_works_in_a_forked_child_process(gateway):
    """A fork does not copy the thread of the event loop, so the child must start its own."""
    run = subprocess.run(
        [sys.executable, "-c", FORK, gateway.url], check=False, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.splitlines() == ["Hello there!"] * 2, run.stderr
