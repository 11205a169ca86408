"""Looks at every node again and again, each at its own pace, so that a node that is down delays no other."""

import asyncio
import logging
import time

from helexa.cortex.fleet import Fleet, Node, Report
from helexa.cortex.node_client import NodeClient, NodeError

log = logging.getLogger(__name__)

UNSETTLED_INTERVAL_SECS = 1.0  # what is down or recovering serves nobody: notice soon when it is back


class Poller:
    """Keeps a fleet's picture current."""

    def __init__(self, fleet: Fleet, client: NodeClient, interval_secs: float) -> None:
        self._fleet = fleet
        self._client = client
        self._interval_secs = interval_secs

    async def run(self) -> None:
        """Poll all nodes, the first time at once, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for node in self._fleet.view().nodes:
                group.create_task(self._watch(node.name))

    async def poll(self, name: str) -> None:
        """Look at one node once. `/models` decides its health; the rest is best effort."""
        node = self._fleet.node(name)
        began = time.monotonic()
        models, health, discovery = await asyncio.gather(
            self._client.models(node.endpoint),
            self._client.health(node.endpoint),
            self._client.discovery(node.endpoint) if node.discovery is None or node.misses else _nothing(),
            return_exceptions=True,
        )
        for outcome in (models, health, discovery):
            if isinstance(outcome, BaseException) and not isinstance(outcome, NodeError):
                raise outcome
        if isinstance(models, BaseException):
            self._fleet.missed(name, str(models))
            return
        report = Report(
            models=models,
            health=None if isinstance(health, BaseException) else health,
            discovery=None if isinstance(discovery, BaseException) else discovery,
            urls=await self._urls(node, list(models)),
        )
        self._fleet.answered(name, report, began)

    async def _watch(self, name: str) -> None:
        while True:
            try:
                await self.poll(name)
            except Exception as error:  # a fault in reading one node must not end the polling of all
                log.exception("polling %s failed", name)
                self._fleet.missed(name, type(error).__name__)
            node = self._fleet.node(name)
            settled = node.healthy and all(info.status != "recovering" for info in node.models.values())
            await asyncio.sleep(self._interval_secs if settled else min(self._interval_secs, UNSETTLED_INTERVAL_SECS))

    async def _urls(self, node: Node, models: list[str]) -> dict[str, str]:
        """Where each model is served; a node is asked once per model."""
        new = [model for model in models if model not in node.urls]
        found = await asyncio.gather(*(self._client.url(node.endpoint, model) for model in new))
        known = {model: node.urls[model] for model in models if model in node.urls}
        return known | dict(zip(new, found, strict=True))


async def _nothing() -> None:
    return None
