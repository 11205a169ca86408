"""Report the node's health from periodic readings of memory and devices."""

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
    """Reads memory and accelerators every few seconds, so that reports do not block on the readings.

    The last good readings remain if later readings fail or report no memory.

    Args:
        registry: models of the node.
        activation: loading state of the default models.
        responses: prefix of the ids of stored responses; None without a response store.
        memory: returns the free and total bytes of host memory, without blocking.
        devices: returns the state of the accelerators; may block on a busy driver.
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
        """Return the node's health without blocking."""
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
        """Refresh the readings until canceled."""
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
