"""Periodic readings of memory and devices do not block requests, and failed readings keep the last good value."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from helexa.core.node_reports import DeviceHealth
from helexa.neuron.hardware.host_memory import host_memory
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.routes import health_and_model_list
from helexa.neuron.routes.health_and_model_list import HealthMonitor
from neuron.fake_models import ENGINE, make_model, until
from neuron.memory_requests import needs
from neuron.running_node import Node, running


def card(index: int, free: int) -> DeviceHealth:
    return DeviceHealth(index=index, vram_used_mb=100, vram_free_mb=free)


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        ({"memory.max": "max"}, None, None),
        ({"memory.max": "1000000"}, 1000000, 1000000),
        ({"memory.max": "1000000", "memory.current": "400000"}, 600000, 1000000),
        ({"memory.max": "1000000", "memory.current": "2000000"}, 0, 1000000),
        (
            {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 5\ninactive_file 300000\n"},
            400000,
            1000000,
        ),
        (
            {
                "memory.max": "1000000",
                "memory.current": "900000",
                "memory.stat": "active_file 100000\nslab_reclaimable 2000\nslab_unreclaimable 50\n",
            },
            202000,
            1000000,
        ),
    ],
)
def test_memory_reported_in_a_container_is_its_limit(
    tmp_path: Path, files: dict[str, str], free: int | None, total: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    machine = psutil.virtual_memory()
    assert host_memory(tmp_path)[1] == (total or machine.total)
    if free is not None:
        assert host_memory(tmp_path)[0] == free


@pytest.fixture
def monitor(node: Node, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HealthMonitor]:
    assert node.app is not None
    monkeypatch.setattr(health_and_model_list, "READING_SECONDS", 0.0)
    return partial(HealthMonitor, node.app.state.registry, node.app.state.activation)


async def test_health_keeps_the_last_reading_if_memory_or_devices_cannot_be_read(
    monitor: Callable[..., HealthMonitor],
) -> None:
    memories = iter([(1000 << 20, 2000 << 20), (0, 0), OSError("gone"), (900 << 20, 2000 << 20)])
    devices = iter([[card(0, 500), card(1, 600)], [], [card(1, 0)], OSError("GPU is lost")])
    exhausted: list[Iterator[Any]] = []

    def take(readings: Iterator[Any]) -> Any:
        reading = next(readings, None)
        if reading is None:
            exhausted.append(readings)
            raise OSError("no more")
        if isinstance(reading, OSError):
            raise reading
        return reading

    watched = monitor(memory=lambda: take(memories), devices=lambda: take(devices))
    reading = asyncio.create_task(watched.run())
    await until(lambda: memories in exhausted and devices in exhausted)
    report = watched.report()
    assert (report.memory_free_mb, report.memory_total_mb) == (900, 2000)
    assert [device.vram_free_mb for device in report.devices] == [500, 0]  # 0 is a reading
    reading.cancel()


async def test_free_memory_of_zero_is_reported_as_zero(monitor: Callable[..., HealthMonitor]) -> None:
    free = 1000 << 20
    watched = monitor(memory=lambda: (free, 2000 << 20), devices=list)
    reading = asyncio.create_task(watched.run())
    await until(lambda: watched.report().memory_free_mb == 1000)
    free = 0
    await until(lambda: watched.report().memory_free_mb == 0)
    reading.cancel()


async def test_blocked_gpu_driver_delays_neither_health_nor_host_memory_readings(
    monitor: Callable[..., HealthMonitor],
) -> None:
    stuck, goes_on = threading.Event(), threading.Event()
    readings = iter([[card(0, 500)]])
    free = 1000 << 20

    def devices() -> list[DeviceHealth]:
        if known := next(readings, None):
            return known
        stuck.set()
        goes_on.wait(60)
        return []

    watched = monitor(memory=lambda: (free, 2000 << 20), devices=devices)
    reading = asyncio.create_task(watched.run())
    await until(stuck.is_set)
    free = 800 << 20
    await until(lambda: watched.report().memory_free_mb == 800)
    assert [device.vram_free_mb for device in watched.report().devices] == [500]
    goes_on.set()
    reading.cancel()


async def test_configured_memory_limit_and_the_grantable_rest_are_reported(tmp_path: Path) -> None:
    async with running({"NEURON_HARNESS__TORCH__MEMORY_LIMIT_MB": "64"}) as node:
        assert (await node.get("/discovery"))[1]["memory_limit_mb"] == 64
        assert (await node.load(make_model(tmp_path)))[0] == 200
        registry: Registry = node.app.state.registry  # pyright: ignore[reportOptionalMemberAccess]
        engine = registry.get("org/tiny").engine
        assert engine.granted_bytes == 0  # the fake engine asks for no memory
        assert (await node.get("/models"))[1][0]["granted_mb"] == 0
        request = needs(free=1 << 40, limit=64 << 20, weights=40 << 20, loading=0, step=0, context=64, page=1)
        registry.memory.grant(engine.pid, request)
        granted_mb = engine.granted_bytes >> 20
        assert 40 <= granted_mb < 64
        assert (await node.get("/models"))[1][0]["granted_mb"] == granted_mb
        report = (await node.get("/health"))[1]
        assert report["grantable_mb"] == (64 * 1024 * 1024 - engine.granted_bytes) >> 20


async def test_node_without_a_memory_limit_reports_the_memory_a_new_model_may_use(node: Node) -> None:
    assert "memory_limit_mb" not in (await node.get("/discovery"))[1]
    _, report = await node.get("/health")
    assert 0 <= report["grantable_mb"] <= report["memory_free_mb"]


async def test_polling_endpoints_respond_while_an_engine_hangs(node: Node, tmp_path: Path) -> None:
    await node.load(make_model(tmp_path))
    alive = [child for child in psutil.Process(os.getpid()).children() if child.status() != psutil.STATUS_ZOMBIE]
    (engine,) = [child for child in alive if ENGINE[1] in child.cmdline()]
    engine.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            for path in ("/models", "/health", "/discovery", "/version", "/v1/models", "/metrics"):
                assert (await node.read(path))[0] == 200
    finally:
        engine.send_signal(signal.SIGCONT)


async def test_model_load_in_progress_is_shown_in_health(node: Node, tmp_path: Path) -> None:
    slow = make_model(tmp_path, "slow")
    loading = asyncio.create_task(node.load(slow))

    async def halfway() -> bool:
        _, report = await node.get("/health")
        return report["loading"] == [{"model_id": "org/tiny", "stage": "weights", "progress": 0.5}]

    while not await halfway():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    slow.with_suffix(".go").touch()
    assert (await loading)[0] == 200
    _, report = await node.get("/health")
    assert report["loading"] == []
    assert report["memory_total_mb"] > report["memory_free_mb"] > 0


@pytest.fixture
async def node():
    async with running({}) as node:
        yield node
