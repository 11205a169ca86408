"""Two nodes at loopback addresses compute one model together, as `neuron serve` processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import psutil
import pytest

from ports import free_port

READY_SECONDS = 120.0
PROMPT = "The capital of France is"


class Hosts:
    """The node processes of a group of two hosts, at 127.0.0.1 and 127.0.0.2."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._model = model
        self._resources = ExitStack()
        self._group_port = free_port("127.0.0.1")
        self.port = free_port("127.0.0.1")
        (folder / "secret").write_text("the secret of these two hosts")
        (folder / "other").write_text("another secret of two hosts")

    def command(self, host: int) -> list[str]:
        model = ["--model", str(self._model)] if host == 0 else []
        return [sys.executable, "-m", "helexa.neuron", "serve", "--hosts", "2", "--port", str(self.port), *model]

    def environment(self, host: int, secret: str = "secret") -> dict[str, str]:
        return os.environ | {
            "RANK": str(host),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._group_port),
            "NEURON_GROUP__INTERFACE": f"127.0.0.{host + 1}",
            "NEURON_GROUP__SECRET_FILE": str(self.folder / secret),
            "NEURON_HARNESS__TORCH__DEVICE": "cpu",
            "NEURON_HARNESS__TORCH__THREADS": "1",
            "NEURON_HARNESS__TORCH__KV_CACHE_MB": "64",
        }

    def start(self, host: int) -> psutil.Popen:
        log = self._resources.enter_context((self.folder / f"host{host}.log").open("ab"))
        process = psutil.Popen(self.command(host), env=self.environment(host), stderr=log)
        self._resources.callback(self.stop, process)
        return process

    def fail(self, host: int, secret: str = "secret", *, code: int = 1, **changes: str) -> str:
        """Start a node that must fail with the exit code `code`, and return the last line of its standard error."""
        environment = {**self.environment(host, secret), **changes}
        environment = {name: value for name, value in environment.items() if value}
        run = subprocess.run(
            self.command(host), env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == code
        return run.stderr.splitlines()[-1]

    def stop(self, process: psutil.Popen) -> None:
        if not process.is_running():
            return
        processes = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive

    def close(self) -> None:
        self._resources.close()

    async def status(self) -> str:
        """Return the status of the model; empty if the node does not list it yet."""
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(f"http://127.0.0.1:{self.port}/models") as response:
                    models = await response.json()
            except aiohttp.ClientError:
                return ""
        return models[0]["status"] if models else ""

    async def wait_for(self, condition: Callable[[str], bool]) -> None:
        async with asyncio.timeout(READY_SECONDS):
            while not condition(await self.status()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def complete(self) -> str:
        body = {"model": self._model.stem, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as response,
        ):
            answer = await response.json()
            assert response.status == 200, answer
            return answer["choices"][0]["text"]


@pytest.fixture(scope="module")
def hosts(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), smollm2_gguf)
    yield hosts
    hosts.close()


def test_host_of_a_host_group_exits_with_a_one_line_error_if_its_rank_is_unset(hosts: Hosts) -> None:
    assert "the host group has no rank; set [group] rank or RANK" in hosts.fail(1, code=78, RANK="")


async def test_model_divided_among_two_hosts_recovers_after_the_second_host_restarts(hosts: Hosts) -> None:
    """The load waits for host 1, and the model recovers when host 1 is back."""
    hosts.start(0)
    async with asyncio.timeout(READY_SECONDS):
        while "accepts hosts" not in (hosts.folder / "host0.log").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert "another secret" in hosts.fail(1, "other")
    member = hosts.start(1)
    await hosts.wait_for(lambda status: status == "loaded")
    first = await hosts.complete()
    assert first.startswith(" Paris")
    hosts.stop(member)
    await hosts.wait_for(lambda status: status == "recovering")
    hosts.start(1)
    await hosts.wait_for(lambda status: status == "loaded")
    assert await hosts.complete() == first
