"""What the node says of itself at this moment, from readings that are taken beforehand."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from helexa.core.fleet import DeviceHealth, Health, Loading
from helexa.neuron.accelerators import device_health
from helexa.neuron.activation import Activation
from helexa.neuron.host_memory import host_memory
from helexa.neuron.registry import Registry

log = logging.getLogger(__name__)

READING_SECONDS = 5.0


@dataclass(frozen=True)
class Readings:
    """What was read of the machine, in MiB."""

    memory_free_mb: int = 0
    memory_total_mb: int = 0
    devices: Sequence[DeviceHealth] = field(default_factory=tuple[DeviceHealth, ...])

    @classmethod
    def take(cls) -> "Readings":
        """Read everything; a busy driver may let it take long."""
        free, total = host_memory()
        return cls(free >> 20, total >> 20, device_health())

    def then(self, later: "Readings") -> "Readings":
        """The later readings; where one is missing or zero, which no sound one is, the earlier."""
        devices = {device.index: device for device in self.devices}
        devices |= {device.index: device for device in later.devices if device.vram_free_mb}
        return Readings(
            later.memory_free_mb or self.memory_free_mb,
            later.memory_total_mb or self.memory_total_mb,
            [devices[index] for index in sorted(devices)],
        )


class HealthMonitor:
    """Reads the machine every few seconds, so that a report never waits for it.

    Attributes:
        readings: the last good ones.
    """

    def __init__(
        self, registry: Registry, activation: Activation, *, take: Callable[[], Readings] = Readings.take
    ) -> None:
        self.readings = Readings()
        self._registry = registry
        self._activation = activation
        self._take = take
        self._begun = time.monotonic()

    def report(self) -> Health:
        """The node's health; never waits."""
        readings = self.readings
        return Health(
            uptime_secs=int(time.monotonic() - self._begun),
            memory_free_mb=readings.memory_free_mb or None,
            memory_total_mb=readings.memory_total_mb or None,
            devices=list(readings.devices),
            activation=self._activation.snapshot(),
            loading=[
                Loading(model_id=info.id, stage=info.stage, progress=info.progress) for info in self._registry.loading()
            ],
            models=[model.load() for model in self._registry.models()],
        )

    async def run(self) -> None:
        """Keep the readings fresh until cancelled."""
        while True:
            try:
                self.readings = self.readings.then(await asyncio.to_thread(self._take))
                self._registry.memory.observe(self.readings.memory_free_mb << 20)
            except Exception:
                log.exception("the machine could not be read")
            await asyncio.sleep(READING_SECONDS)
