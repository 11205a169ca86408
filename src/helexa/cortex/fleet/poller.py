"""Polls each node in its own task, so that a slow node does not delay other polls."""

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf

from helexa.cortex.fleet.fleet import MAX_SILENCE_SECS, Fleet
from helexa.cortex.fleet.fleet_view import MISSES_TO_DOWN, Node, Report
from helexa.cortex.fleet.node_client import MAX_ID_CHARS, NodeClient, is_usable_id
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.fleet.openai_node import OpenAINode

log = logging.getLogger(__name__)

UNSETTLED_INTERVAL_SECS = 1.0  # poll interval for failing nodes and recovering models, so that they return soon
MAX_BACK_OFF = 30  # maximum factor by which failed polls lengthen the poll interval of a node
MAX_BUSY_INTERVAL_SECS = 60.0  # longest interval for nodes that are too busy to answer polls
WATCHED_INTERVAL_SECS = 1.0  # shortest interval between two polls of a node during `watched`
MAX_WATCHED_POLLS_PER_SEC = 50.0  # maximum for all nodes together during `watched`
REFRESH_SECS = 1.0  # `refresh` polls only nodes whose last poll is older
REFRESH_TIMEOUT_SECS = 2.0

Poll = Callable[[Node, str | None], Awaitable[Report]]
Address = tuple[str, str, str]


class Poller:
    """Keeps the state of a fleet up to date by polling its nodes."""

    def __init__(self, fleet: Fleet, client: NodeClient, interval_secs: float) -> None:
        self._fleet = fleet
        self._client = client
        self._local_at: dict[str, float] = {}  # when clients last caused a request for a node's local models
        self._openai_node = OpenAINode(client)
        self._polls: Mapping[str, Poll] = {"neuron": client.poll, "openai": self._openai_node.poll}
        self._watchers = 0
        self._watched = asyncio.Event()
        self._polled_at: dict[str, float] = {}
        self._reported_at: dict[str, float] = {}  # start of the poll that gave the stored report, by node name
        self._refreshes: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, int] = {}  # number of refused model ids in the last report, by node name
        self.interval_secs = interval_secs  # interval between two polls of a healthy node; may be changed at any time

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Poll the nodes more often until the end of the `with` block.

        The caller enters the block for each client that reads `/api/events`, which reports changes of the nodes.
        """
        self._watchers += 1
        self._watched.set()
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._watched.clear()

    async def run(self) -> None:
        """Poll all configured nodes until canceled. Follow changes of the configuration."""
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
            await _stop([*polls.values(), *self._refreshes.values()])

    async def refresh(self) -> None:
        """Poll each healthy node whose last poll is older than `REFRESH_SECS`.

        The models on the disks of healthy nodes are read again, too. The method returns after `REFRESH_TIMEOUT_SECS` at
        the latest; polls that take longer go on. A third-party backend that runs requests of this gateway is not
        polled.
        """
        now = time.monotonic()
        for node in self._fleet.view().nodes:
            is_fresh = now - self._polled_at.get(node.name, -inf) < REFRESH_SECS and node.local is None
            is_busy = node.kind == "openai" and self._fleet.is_answering(node.name)
            if not node.healthy or is_fresh or is_busy or node.name in self._refreshes:
                continue
            task = self._refreshes[node.name] = asyncio.create_task(self._poll_safely(node.name, self._refresh))
            task.add_done_callback(lambda _, name=node.name: self._refreshes.pop(name, None))
        if self._refreshes:
            await asyncio.wait(list(self._refreshes.values()), timeout=REFRESH_TIMEOUT_SECS)

    async def _refresh(self, name: str) -> None:
        """Poll one node outside of its interval.

        A failure does not count as a failed poll, because clients cause these polls. The request for the models on the
        node's disks makes the node look for new models.
        """
        with suppress(NodeError):
            if time.monotonic() - self._polled_at.get(name, -inf) >= REFRESH_SECS:
                await self._read(name)
            await self.refresh_local(name)

    async def refresh_local(self, name: str, *, forced: bool = False) -> None:
        """Read the models on a node's disks, at most every `REFRESH_SECS` unless `forced`.

        Raises:
            KeyError: the node is not configured.
            NodeError: the request failed.
        """
        node = self._fleet.node(name)
        # A node whose health lacks `local_revision` does not report the models on its disks.
        if node.health is None or node.health.local_revision is None:
            return
        if forced or time.monotonic() - self._local_at.get(name, -inf) >= REFRESH_SECS:
            self._local_at[name] = time.monotonic()
            found = await self._client.local_models(node.endpoint, self._fleet.bearer(name))
            if self._fleet.has(node):  # otherwise the node was removed during the request
                self._fleet.found_local(name, found)

    async def poll(self, name: str) -> None:
        """Poll one node once, and store the result or the failure in the fleet.

        If the poll fails because the gateway itself is out of file descriptors, ports or memory, the node's state does
        not change.
        """
        node, started_at = self._fleet.node(name), time.monotonic()
        try:
            await self._read(name)
        except NodeError as error:
            if error.local:
                log.warning(
                    "node not polled node=%s; "
                    "the gateway is out of file descriptors, ports or memory: raise these limits of the gateway",
                    name,
                )
            elif self._fleet.has(node):
                self._fleet.missed(name, str(error), _alive_since(node, error, started_at))

    async def _read(self, name: str) -> None:
        """Request a report from a node, and store it unless a newer one is stored."""
        node = self._fleet.node(name)
        started_at = self._polled_at[name] = time.monotonic()
        report = await self._polls[node.kind](node, self._fleet.bearer(name))
        if self._fleet.has(node) and started_at >= self._reported_at.get(name, -inf):
            self._reported_at[name] = started_at
            self._fleet.answered(name, self._with_usable_ids(name, report), started_at)

    def _with_usable_ids(self, name: str, report: Report) -> Report:
        """Return the report without models whose ids are unusable."""
        # Clients show the ids in terminals and copy them into commands, where an id must not be an option.
        usable = {id: info for id, info in report.models.items() if is_usable_id(id)}
        refused = len(report.models) - len(usable)
        if refused and refused != self._refused.get(name):
            log.warning(
                "models not served node=%s models=%d max_chars=%d; "
                "their ids are too long or begin with '-': rename the models",
                *(name, refused, MAX_ID_CHARS),
            )
        self._refused[name] = refused
        return dataclasses.replace(report, models=usable) if refused else report

    async def _watch(self, node: Node) -> None:
        while self._fleet.has(node):
            if node.kind == "openai" and self._fleet.is_answering(node.name):
                await self._poll_safely(node.name, self._poll_load)
                await self._wait_for_answers(node.name)
                continue
            await self._poll_safely(node.name, self.poll)
            if self._fleet.has(node):
                await self._pause(self._fleet.node(node.name))

    async def _poll_safely(self, name: str, poll: Callable[[str], Awaitable[None]]) -> None:
        try:
            await poll(name)
        except Exception as error:  # a bug in processing a response must not stop the polling
            log.exception("poll failed node=%s; the next poll follows", name)
            self._fleet.missed(name, type(error).__name__)

    async def _poll_load(self, name: str) -> None:
        node = self._fleet.node(name)
        started_at = time.monotonic()
        report = await self._openai_node.poll_load(node, self._fleet.bearer(name))
        if report is not None and self._fleet.has(node):
            self._fleet.answered(name, report, started_at)

    async def _wait_for_answers(self, name: str) -> None:
        """Wait until a backend runs no requests, but at most one polling interval."""
        # No poll is sent during requests. A single-threaded server would not answer the poll, and llama-cpp-python's
        # server interrupts running answers even for `GET /v1/models`. The bytes of the running answers show whether the
        # server is alive.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.interval_secs):
                await self._fleet.emptied(name)

    async def _pause(self, node: Node) -> None:
        """Wait until the next poll is due. The wait is shorter during `watched`."""
        pause = pause_secs(node, self.interval_secs, random.random())
        count = len(self._fleet.view().nodes)
        watched_pause = min(pause, max(WATCHED_INTERVAL_SECS, count / MAX_WATCHED_POLLS_PER_SEC))
        if node.is_unresponsive:
            watched_pause = pause
        await asyncio.sleep(watched_pause)
        if not self._watchers and pause > watched_pause:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause - watched_pause):
                    await self._watched.wait()


def pause_secs(node: Node, interval_secs: float, chance: float) -> float:
    """Return the seconds until the next poll of a node.

    If the node is down or too busy to answer polls, the pause grows with each failed poll.

    Args:
        interval_secs: polling interval of a healthy node.
        chance: random number from 0 to 1. It spreads the polls of nodes that went down at the same time.
    """
    if node.healthy and not node.misses and all(info.status != "recovering" for info in node.models.values()):
        return interval_secs
    doublings = max(0, node.misses - MISSES_TO_DOWN)
    # Unanswered polls fill the node's queue of connections that it has not accepted yet, so the node is polled less
    # often.
    if node.is_unresponsive:
        return min(interval_secs * min(2**doublings, MAX_BACK_OFF), max(interval_secs, MAX_BUSY_INTERVAL_SECS))
    base_secs = min(interval_secs, UNSETTLED_INTERVAL_SECS)
    # Random, so that nodes that went down together are not polled at the same time.
    return base_secs * min(2**doublings, MAX_BACK_OFF) * (1 - chance / 2) if doublings else base_secs


def _alive_since(node: Node, error: NodeError, started_at: float) -> float:
    """Return the time after which data from the node shows that it is not down.

    If no data can show this, return infinity.
    """
    # A node of helexa answers polls while it runs requests, so only data that arrived during the failed poll counts. A
    # third-party backend may answer no polls while it runs a request, so data of the last `MAX_SILENCE_SECS` counts.
    if not error.timed_out:
        return inf
    return started_at if node.kind == "neuron" else time.monotonic() - MAX_SILENCE_SECS


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
