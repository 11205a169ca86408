"""What the node says of itself at this moment, from readings that are taken beforehand."""

import asyncio
import time

from helexa.core.fleet import DeviceHealth, Health
from helexa.neuron.activation import Activation
from helexa.neuron.discovery import device_health, discover
from helexa.neuron.registry import Registry

READING_SECONDS = 5.0


class HealthMonitor:
    """Reads the accelerators every few seconds, so that a report never waits for one of them."""

    def __init__(self, registry: Registry, activation: Activation) -> None:
        self._registry = registry
        self._activation = activation
        self._begun = time.monotonic()
        self._devices: list[DeviceHealth] = []

    def report(self) -> Health:
        """The node's health; never waits."""
        return Health(
            uptime_secs=int(time.monotonic() - self._begun),
            devices=self._devices,
            activation=self._activation.snapshot(),
            models=[model.load() for model in self._registry.models()],
        )

    async def run(self) -> None:
        """Keep the readings fresh until cancelled; the last good ones stay when a reading fails."""
        while discover().devices:
            self._devices = await asyncio.to_thread(device_health) or self._devices
            await asyncio.sleep(READING_SECONDS)
