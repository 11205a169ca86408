"""Cold loads: one at a time per (node, model), shared by everybody who waits for it."""

import asyncio
import logging
from dataclasses import dataclass

from helexa.core.errors import ApiError, overloaded, service_unavailable
from helexa.core.fleet import ModelInfo
from helexa.cortex.fleet import Fleet
from helexa.cortex.metrics import Metrics
from helexa.cortex.node_client import NodeClient, NodeError
from helexa.cortex.placement import Cold
from helexa.cortex.router import Warm

log = logging.getLogger(__name__)

MAX_WAITERS = 256
RETRY_FAILED = 5


@dataclass
class _Job:
    task: asyncio.Task[Warm]
    waiters: int = 0


class Loader:
    """Asks nodes to load models."""

    def __init__(self, fleet: Fleet, client: NodeClient, metrics: Metrics) -> None:
        self._fleet = fleet
        self._client = client
        self._metrics = metrics
        self._jobs: dict[tuple[str, str], _Job] = {}

    async def load(self, cold: Cold) -> Warm:
        """Wait until the model serves. The load goes on if the caller is cancelled.

        Raises:
            ApiError: 503 with the node's reason, or because too many wait for this load already.
        """
        key = (cold.node, cold.model)
        job = self._jobs.get(key)
        if job is None:
            job = _Job(asyncio.create_task(self._run(cold), name=f"load {cold.model} on {cold.node}"))
            self._jobs[key] = job
            job.task.add_done_callback(lambda task: self._finished(key, task))
        if job.waiters >= MAX_WAITERS:
            raise overloaded(f"too many requests wait for model '{cold.model}' to load", RETRY_FAILED)
        job.waiters += 1
        try:
            return await asyncio.shield(job.task)
        except NodeError as error:
            message = f"model '{cold.model}' could not be loaded on node '{cold.node}': {error}"
            if error.temporary:
                raise service_unavailable(message, RETRY_FAILED) from error
            raise ApiError(503, "service_unavailable", message, type="api_error") from error
        finally:
            job.waiters -= 1

    async def close(self) -> None:
        """Stop waiting for all loads."""
        tasks = [job.task for job in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, cold: Cold) -> Warm:
        endpoint = self._fleet.node(cold.node).endpoint
        log.info("loading %s on %s", cold.model, cold.node)
        with self._fleet.load(cold.node, cold.model):
            await self._client.load(endpoint, cold.spec)
            url = await self._client.url(endpoint, cold.model)
            self._fleet.loaded(cold.node, ModelInfo(id=cold.model, harness=cold.spec.harness), url)
        self._metrics.cold_start(cold.model, cold.node)
        return Warm(cold.model, cold.node, url)

    def _finished(self, key: tuple[str, str], task: asyncio.Task[Warm]) -> None:
        self._jobs.pop(key, None)
        if task.cancelled():
            return
        node, model = key
        error = task.exception()  # taken here too: everybody who waited may be gone
        if error is None:
            log.info("loaded %s on %s", model, node)
        else:
            log.warning("loading %s on %s failed: %s", model, node, error)
