"""Polls each node in a separate task, so that an unresponsive node does not delay other polls."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from helexa.cortex.fleet.fleet import MISSES_TO_DOWN, Fleet
from helexa.cortex.fleet.fleet_view import Node, Report
from helexa.cortex.fleet.node_client import NodeClient, NodeError
from helexa.cortex.fleet.openai_node import OpenAINode

log = logging.getLogger(__name__)

UNSETTLED_INTERVAL_SECS = 1.0  # for failing nodes and recovering models, so that they return to service soon
MAX_BACK_OFF = 30  # maximum factor of `UNSETTLED_INTERVAL_SECS`
WATCHED_INTERVAL_SECS = 1.0  # shortest interval between two polls of a node while clients watch the fleet
MAX_WATCHED_POLLS_PER_SEC = 50.0  # of all nodes together

Poll = Callable[[Node, str | None], Awaitable[Report]]
Address = tuple[str, str, str]


class Poller:
    """Keeps the state of a fleet up to date by polling its nodes.

    Attributes:
        interval_secs: interval between two polls of a healthy node; may be changed at any time.
    """

    def __init__(self, fleet: Fleet, client: NodeClient, interval_secs: float) -> None:
        self._fleet = fleet
        self._polls: Mapping[str, Poll] = {"neuron": client.poll, "openai": OpenAINode(client).poll}
        self._watchers = 0
        self._watched = asyncio.Event()
        self.interval_secs = interval_secs

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context manager during which nodes are polled often, because a client watches the fleet."""
        self._watchers += 1
        self._watched.set()
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._watched.clear()

    async def run(self) -> None:
        """Poll all configured nodes until cancelled.

        When the configuration changes, polling of added nodes starts immediately, and polling of removed nodes stops.
        """
        polls: dict[Address, asyncio.Task[None]] = {}
        try:
            while True:
                self._fleet.reconfigured.clear()
                nodes = {(node.name, node.endpoint, node.kind): node for node in self._fleet.view().nodes}
                await _stop([polls.pop(address) for address in polls.keys() - nodes.keys()])
                for address in nodes.keys() - polls.keys():
                    polls[address] = asyncio.create_task(self._watch(nodes[address]), name=f"poll {address[0]}")
                await self._fleet.reconfigured.wait()
        finally:
            await _stop(list(polls.values()))

    async def poll(self, name: str) -> None:
        """Poll one node once, and store the result or the failure in the fleet.

        If the poll fails because the gateway itself is out of file descriptors, ports or memory, the node's state does
        not change.
        """
        node = self._fleet.node(name)
        started_at = time.monotonic()
        try:
            report = await self._polls[node.kind](node, self._fleet.bearer(name))
        except NodeError as error:
            if error.local:
                log.warning("node %s not polled: the gateway is out of descriptors, ports or memory", name)
            elif self._fleet.has(node):
                self._fleet.missed(name, str(error))
        else:
            if self._fleet.has(node):
                self._fleet.answered(name, report, started_at)

    async def _watch(self, node: Node) -> None:
        while self._fleet.has(node):
            try:
                await self.poll(node.name)
            except Exception as error:  # a bug in processing a response must not stop the polling
                log.exception("polling %s failed", node.name)
                self._fleet.missed(node.name, type(error).__name__)
            if self._fleet.has(node):
                await self._pause(self._fleet.node(node.name))

    async def _pause(self, node: Node) -> None:
        """Wait until the next poll of a node is due. The wait becomes shorter when a client begins to watch."""
        pause = pause_secs(node, self.interval_secs, random.random())
        count = len(self._fleet.view().nodes)
        watched_pause = min(pause, max(WATCHED_INTERVAL_SECS, count / MAX_WATCHED_POLLS_PER_SEC))
        await asyncio.sleep(watched_pause)
        if not self._watchers and pause > watched_pause:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause - watched_pause):
                    await self._watched.wait()


def pause_secs(node: Node, interval_secs: float, chance: float) -> float:
    """Return the seconds until the next poll of a node. If the node is down, the pause grows with each failed poll.

    Args:
        node: the node.
        interval_secs: polling interval of a healthy node.
        chance: random number from 0 to 1. It spreads the polls of nodes that went down at the same time.
    """
    if node.healthy and not node.misses and all(info.status != "recovering" for info in node.models.values()):
        return interval_secs
    base_secs = min(interval_secs, UNSETTLED_INTERVAL_SECS)
    doublings = max(0, node.misses - MISSES_TO_DOWN)
    return base_secs * min(2**doublings, MAX_BACK_OFF) * (1 - chance / 2) if doublings else base_secs


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
