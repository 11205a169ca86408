"""Starts a node for a soak test, and injects faults into its engine."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import aiohttp
import psutil

from support.servers import free_port

sys.path.append(str(Path(__file__).parents[2] / "tests" / "debug_hooks"))

from injection import hooks

STRUCK = ("exit", "hang", "fault", "oom", "nan", "error", "slow")
FAULTS = ("kill", *STRUCK)
"""Kinds of faults that can be injected. All except `kill` are injected with `hooks`."""

STEP_SECONDS = 2.0
_END_SECONDS = 30.0
_TIMEOUT_SECONDS = 300.0
_ENGINE = "helexa.neuron.engine.process"
_RANK = "helexa.neuron.engine.rank_process"


class SoakNode:
    """A node with one model, which runs in a separate process during the `with` block.

    Attributes:
        path: path of the model's file.
        model: id of the model in requests.
        url: base URL of the node.

    Args:
        path: path of the model's file.
        folder: folder for the node's configuration, its log, and the files that trigger faults.
        ranks: number of processes that compute the model together (tensor parallelism).
    """

    model = "soak/first"

    def __init__(self, path: Path, folder: Path, ranks: int = 1) -> None:
        self.path = path
        self._folder = folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "neuron.toml"
        config.write_text(
            f'host = "127.0.0.1"\nport = {port}\n'
            f'[[default_models]]\nmodel_id = "{self.model}"\nsource = "file:{path.absolute()}"\n'
            f"[recovery]\nstep_timeout_secs = {STEP_SECONDS}\nmax_restarts = 1000\n"
            f"[harness.torch]\nkv_cache_mb = 128\ntensor_parallel = {ranks}\n"
        )
        self._environ = os.environ | hooks(",".join(f"{kind}@file={folder / kind}" for kind in STRUCK))
        self._command = [sys.executable, "-m", "helexa.neuron", "--config", str(config)]

    def __enter__(self) -> Self:
        self._log = (self._folder / "neuron.log").open("w+")
        self._process = subprocess.Popen(
            self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end()
        if kind is not None:
            self._log.seek(0)
            sys.stderr.writelines(self._log.readlines()[-40:])
        self._log.close()

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until the node has loaded its model."""
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            while True:
                with suppress(aiohttp.ClientConnectionError):
                    async with session.get(f"{self.url}/models") as response:
                        if any(model["status"] == "loaded" for model in await response.json()):
                            return
                assert self._process.poll() is None, "the node ended"
                await asyncio.sleep(0.05)

    async def strike(self, fault: str) -> None:
        """Inject a fault, one of `FAULTS`, and wait until it has occurred."""
        if fault == "kill":
            engine = next(process for process in self._family() if _ENGINE in process.cmdline())
            engine.kill()
            while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return
        order = self._folder / fault
        order.touch()
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            while order.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def ranks(self) -> list[psutil.Process]:
        """Return the processes (ranks) that compute the model together. The engine process itself is rank 0."""
        return [process for process in self._family() if _ENGINE in process.cmdline() or _RANK in process.cmdline()]

    def figures(self) -> tuple[float, float, int, int]:
        """Measure the node's resources.

        Returns:
            Written MiB of the server process and of all processes (see `_written_mb`), number of open files of the
            server process, and number of processes.
        """
        family = self._family()
        memory = [_written_mb(process) for process in family]
        return round(memory[0], 1), round(sum(memory), 1), family[0].num_fds(), len(family)

    def end(self) -> int:
        """Stop the node and return its exit code. Kill processes that do not end.

        Raises:
            AssertionError: a process of the node had to be killed.
        """
        if self._process.poll() is None:
            family = self._family()
            self._process.send_signal(signal.SIGTERM)
            _, remaining = psutil.wait_procs(family, _END_SECONDS)
            for process in remaining:
                process.kill()
            self._process.wait()
            assert not remaining, f"{remaining} did not end"
        return self._process.returncode

    def _family(self) -> list[psutil.Process]:
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]


def _written_mb(process: psutil.Process) -> float:
    """Return the MiB of memory that only this process uses and that it has written.

    Mapped libraries and weights do not count. Other processes may share them, so a process's share of them changes when
    other processes start or end.
    """
    if sys.platform != "linux":
        memory: Any = process.memory_full_info()
        return memory.uss / 2**20
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[-2]) for line in lines[1:]}
    return (kib["Pss_Anon"] + kib["Pss_Shmem"]) / 1024
