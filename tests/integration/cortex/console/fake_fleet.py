"""A gateway in front of fake nodes, in a thread of its own, for tests with a browser."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex

ADMIN, ALICE, BOB = "the-admin-key", "alices-key", "bobs-key"
KEYS = [
    {"key": ADMIN, "account_id": "ops", "key_id": "ops-admin", "role": "admin"},
    {"key": ALICE, "account_id": "alice", "key_id": "alice-1", "hard_cap": 50_000},
    {"key": BOB, "account_id": "bob", "key_id": "bob-1"},
]

T = TypeVar("T")


@dataclass
class FakeFleet:
    """A running gateway, its nodes by name, and the event loop that runs them."""

    cortex: Cortex
    nodes: dict[str, FakeNode]
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.cortex.url

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the gateway's thread and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def until(self, condition: Callable[[], Any]) -> None:
        self.run(eventually(condition))

    def ask(self, key: str | None = ALICE, model: str = "Org/M", **fields: Any) -> int:
        """Send a chat request, and return the status of its response."""

        async def ask() -> int:
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, **fields}
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            url = f"{self.url}/v1/chat/completions"
            async with self.cortex.client.post(url, json=body, headers=headers) as response:
                await response.read()
                return response.status

        return self.run(ask())

    def call(self, method: str, path: str, body: Any = None, key: str = ADMIN) -> Any:
        """Send a request to the API, and return the JSON value of its response."""

        async def call() -> Any:
            headers = {"authorization": f"Bearer {key}"}
            request = self.cortex.client.request(method, self.url + path, json=body, headers=headers)
            async with request as response:
                return await response.json()

        return self.run(call())


@contextmanager
def running(
    *nodes: FakeNode,
    require_auth: bool = True,
    also: AbstractAsyncContextManager[Any] | None = None,
    settings: Callable[[], dict[str, Any]] = dict,
    **catalog: Any,
) -> Iterator[FakeFleet]:
    """Run a gateway in front of `nodes`.

    Args:
        also: another server to run, which is ready before `settings` is called.
        settings: returns further sections of the configuration.
        catalog: contents of the model catalog.
    """
    loop = asyncio.new_event_loop()
    ready: threading.Event = threading.Event()
    stop = asyncio.Event()
    fleets: list[FakeFleet] = []
    failures: list[BaseException] = []
    sections = {"entitlements": {"require_auth": require_auth, "keys": KEYS}}

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for node in nodes:
                await stack.enter_async_context(node.serving())
            if also is not None:
                await stack.enter_async_context(also)
            cortex = await stack.enter_async_context(
                running_cortex(*nodes, settings=sections | settings(), poll_interval_secs=0.1, **catalog)
            )
            fleets.append(FakeFleet(cortex, {node.name: node for node in nodes}, loop))
            ready.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if failures:
        raise failures[0]
    try:
        yield fleets[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
    if failures:
        raise failures[0]
