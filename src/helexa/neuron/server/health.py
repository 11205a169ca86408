"""The node's health report (`GET /health`), with the results of periodic measurements of memory and devices."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from helexa.core.fleet import DeviceHealth, Health, Loading
from helexa.neuron.hardware.accelerators import device_health
from helexa.neuron.hardware.host_memory import host_memory
from helexa.neuron.lifecycle.activation import Activation
from helexa.neuron.lifecycle.registry import Registry

log = logging.getLogger(__name__)

READING_SECONDS = 5.0


class HealthMonitor:
    """Measures free memory and the state of the accelerators every `READING_SECONDS`, and builds health reports.

    Reports use the last measurement, because a measurement may block. If a measurement fails or reports no memory, the
    previous values remain.

    Args:
        registry: models of the node.
        activation: progress of the default models' loads.
        responses: prefix of the ids of stored responses; None if the node stores no responses.
        memory: function that returns the free and the total bytes of host memory, without blocking.
        devices: function that returns the state of the accelerators. It may block if the driver is busy.
    """

    def __init__(
        self,
        registry: Registry,
        activation: Activation,
        *,
        responses: str | None = None,
        memory: Callable[[], tuple[int, int]] = host_memory,
        devices: Callable[[], list[DeviceHealth]] = device_health,
    ) -> None:
        self._registry = registry
        self._activation = activation
        self._responses = responses
        self._read_memory = memory
        self._read_devices = devices
        self._memory = (0, 0)
        self._devices: dict[int, DeviceHealth] = {}
        self._begun = time.monotonic()

    def report(self) -> Health:
        """Return the current health report of the node, with the last measurements. Does not block."""
        free, total = self._memory
        return Health(
            uptime_secs=int(time.monotonic() - self._begun),
            memory_free_mb=free >> 20 if total else None,
            memory_total_mb=total >> 20 or None,
            devices=[self._devices[index] for index in sorted(self._devices)],
            activation=self._activation.snapshot(),
            loading=[
                Loading(model_id=info.id, stage=info.stage, progress=info.progress) for info in self._registry.loading()
            ],
            poisoned=self._registry.poisoned(),
            responses=self._responses,
            models=[model.load() for model in self._registry.models()],
        )

    async def run(self) -> None:
        """Measure memory and accelerators every `READING_SECONDS` until the task is canceled."""
        await asyncio.gather(_repeat(self._take_memory), _repeat(self._take_devices))

    async def _take_memory(self) -> None:
        free, total = self._read_memory()
        if total:
            self._memory = (free, total)
            self._registry.memory.observe(free)

    async def _take_devices(self) -> None:
        read = await asyncio.to_thread(self._read_devices)
        self._devices |= {device.index: device for device in read if device.vram_free_mb}


async def _repeat(reading: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await reading()
        except OSError as error:
            log.error("reading memory or devices failed: %s", error)
        except Exception:
            log.exception("reading memory or devices failed")
        await asyncio.sleep(READING_SECONDS)
