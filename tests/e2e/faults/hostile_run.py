"""A node that loads hostile model folders, while its health, its memory and another model are watched."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from ports import free_port

GOOD = "org/good"
HOSTILE = "org/hostile"
MEMORY_LIMIT_MB = 1024
_REQUEST_SECONDS = 300.0  # a hostile model's request may take as long as the limits on CPU time allow

_KINDS = {
    "tokenizer_process": "text",
    "template_sandbox_process": "template",
    "check_process": "grammar",
    "helexa.neuron.engine": "engine",
}


@dataclass
class Observations:
    """What was observed during a run.

    Attributes:
        statuses: number of responses to requests for hostile models, by route and status.
        health_secs: longest time until a response of /health.
        working_secs: longest time until a response of /health, without the time in which threads of the server waited
            for a core. On a busy machine, this time says nothing about the server.
        worst: name of the hostile folder during the longest `working_secs`.
        good: number of responses of the other model, by status.
        memory_mb: largest resident memory of a process in MiB, by kind of process.
        total_mb: largest private memory of all processes of the node in MiB.
        broken_lines: errors whose message has several lines.
        slowest: seconds that each folder took.
    """

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    health_secs: float = 0.0
    working_secs: float = 0.0
    worst: str = ""
    good: Counter[int] = field(default_factory=Counter[int])
    memory_mb: dict[str, int] = field(default_factory=dict[str, int])
    total_mb: int = 0
    broken_lines: list[Any] = field(default_factory=list[Any])
    slowest: dict[str, float] = field(default_factory=dict[str, float])


class HostileRun:
    """A node process with the model `GOOD`. Its working directory contains the hostile folders."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.observed = Observations()
        self._base = base
        self._folder = folder
        self._port = free_port()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._attacking = ""

    def __enter__(self) -> Self:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("NEURON_", "HELEXA_"))}
        environ |= {
            "NEURON_HARNESS__TORCH__MEMORY_LIMIT_MB": str(MEMORY_LIMIT_MB),
            "NEURON_HARNESS__TORCH__KV_CACHE_MB": "8",
            "OMP_NUM_THREADS": "1",
        }
        with (self._folder.parent / "node.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "helexa.neuron", "--port", str(self._port)],
                cwd=self._folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            while not self._listens():
                assert self.process.poll() is None, (self._folder.parent / "node.log").read_text()
                time.sleep(0.1)
            status, answer = self.post("/models/load", {"model_id": GOOD, "source": f"file:{self._base}"})
            assert status == 200, answer
            self._measure_memory()
            for watch in (self._watch_health, self._watch_memory, self._watch_good):
                thread = threading.Thread(target=watch)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()

    def attack(self, folder: Path) -> None:
        """Load the model in `folder`, send it requests if it is loaded, and unload it."""
        begun, self._attacking = time.monotonic(), folder.name
        load = {"model_id": HOSTILE, "source": f"file:{self._source(folder)}"}
        status = self._record("load", *self.post("/models/load", load))
        if status == 200:
            message = {"role": "user", "content": "aaaaaaaaaaaa" + "a" * 18 + "b"}
            self._record("tokenize", *self.post("/tokenize", {"model": HOSTILE, "prompt": "a" * 12}))
            chat = {"model": HOSTILE, "messages": [message], "max_tokens": 2}
            self._record("chat", *self.post("/v1/chat/completions", chat))
            completion = {"model": HOSTILE, "prompt": ("a" * 20 + "b") * 500, "max_tokens": 1}
            self._record("completion", *self.post("/v1/completions", completion))
            assert self._record("unload", *self.post("/models/unload", {"model_id": HOSTILE})) == 200
        self.observed.slowest[folder.name] = time.monotonic() - begun

    def post(self, path: str, body: object) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_REQUEST_SECONDS)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def _source(self, folder: Path) -> Path:
        gguf = folder / "model.gguf"
        return gguf if gguf.exists() else folder

    def _record(self, route: str, status: int, answer: Any) -> int:
        self.observed.statuses[route, status] += 1
        if "\n" in str(answer.get("error", "")):
            self.observed.broken_lines.append(answer["error"])
        return status

    def _listens(self) -> bool:
        try:
            return self._health() == 200
        except OSError:
            return False

    def _health(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    def _watch_health(self) -> None:
        observed = self.observed
        while not self._stop.wait(0.02):
            begun, before = time.monotonic(), self._waits()
            self._health()
            seconds = time.monotonic() - begun
            waits = {thread: wait - before.get(thread, 0.0) for thread, wait in self._waits().items()}
            own, main = waits.pop(0), waits.pop(self.process.pid)
            # The main thread may also wait for the interpreter lock of a thread that waits for a core.
            working = seconds - own - main - max(waits.values(), default=0.0)
            observed.health_secs = max(observed.health_secs, seconds)
            if working > observed.working_secs:
                observed.working_secs, observed.worst = working, self._attacking
            if seconds > 0.5:
                print(f"health {seconds:.2f} s, working {working:.2f} s, {self._attacking}", flush=True)

    def _waits(self) -> dict[int, float]:
        """Return the seconds that each thread of the server has waited for a core; under 0, those of this thread."""
        files = {int(file.parent.name): file for file in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")}
        waits: dict[int, float] = {}
        for thread, file in (files | {0: Path("/proc/thread-self/schedstat")}).items():
            with suppress(OSError):  # the thread has ended
                waits[thread] = int(file.read_text().split()[1]) / 1e9
        return waits

    def _watch_good(self) -> None:
        chat = {"model": GOOD, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        while not self._stop.is_set():
            status, _ = self.post("/v1/chat/completions", chat)
            self.observed.good[status] += 1
            self._stop.wait(0.2)

    def _watch_memory(self) -> None:
        while not self._stop.wait(0.05):
            self._measure_memory()

    def _measure_memory(self) -> None:
        total = 0
        node = psutil.Process(self.process.pid)
        for process in [node, *node.children(recursive=True)]:
            try:
                command = " ".join(process.cmdline())
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except (psutil.Error, OSError):
                continue
            anonymous = sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) >> 10
            kind = next((kind for part, kind in _KINDS.items() if part in command), "server")
            self.observed.memory_mb[kind] = max(self.observed.memory_mb.get(kind, 0), anonymous)
            total += anonymous
        self.observed.total_mb = max(self.observed.total_mb, total)
