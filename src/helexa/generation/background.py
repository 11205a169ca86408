"""The library's event loop, which runs in its own thread, and the two kinds of callers that wait for its results.

Engines, connections and requests live in the background event loop. A plain function blocks its thread until the result
is ready. A coroutine awaits the result in its own event loop. So event loops never nest, and both kinds of callers
share the same engines.
"""

import asyncio
import atexit
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from helexa.generation.targets import Targets

T = TypeVar("T")

_ENDING_SECONDS = 10.0


class Background:
    """The library's background event loop and the objects that live in it.

    Attributes:
        targets: the servers and private engines that this process uses; to be accessed only in the event loop.
    """

    def __init__(self) -> None:
        self.targets = Targets()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="helexa", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Schedule `work` in the background event loop and return its future.

        Raises:
            RuntimeError: the caller runs in the thread of the event loop, so waiting for the future would deadlock.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a callback in helexa's event loop must not call helexa; call it in another thread")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """Close all targets, cancel all tasks and stop the thread, within a bounded time."""
        with suppress(Exception):
            self.submit(self._end()).result(_ENDING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ENDING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await self.targets.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_running: Background | None = None
_lock = threading.Lock()


def background() -> Background:
    """Return the background event loop of this process; the first call starts it."""
    global _running  # noqa: PLW0603
    with _lock:
        if _running is None:
            _running = Background()
        return _running


def shut_down() -> None:
    """Stop the background event loop and all engines; the next request starts them again."""
    global _running
    with _lock:
        loop_thread, _running = _running, None
    if loop_thread is not None:
        loop_thread.end()


def _forget() -> None:
    """Forget the background event loop in a forked child process: its thread and engines belong to the parent."""
    global _running, _lock
    _running, _lock = None, threading.Lock()


atexit.register(shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Caller(Protocol):
    """How library code waits for the background event loop: for a plain function or for a coroutine of the user."""

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which runs in the background; an interruption cancels `work`."""
        ...

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call a callback of the user, and await its result if the callback is async."""
        ...


class Blocking:
    """A caller that is a plain function, whose thread is blocked.

    A coroutine that waits only through this class never suspends, so it runs without an event loop; see `blocking`.
    """

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until `work` is done; see `Caller`."""
        future = background().submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # has an effect only if Ctrl-C interrupted the wait

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call the callback in this thread. If it is async, await its result in the background event loop."""
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await self.wait(_awaited(result))


class Awaiting:
    """A caller that is a coroutine in its own event loop."""

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the result of `work`, which runs in the background event loop; see `Caller`."""
        return await asyncio.wrap_future(background().submit(work))

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call the callback and await its result; see `Caller`."""
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits only through a `Blocking` caller, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("a blocking call must not await anything itself")


def blocking_each(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield the items of an async generator that waits only through a `Blocking` caller."""
    try:
        while (item := blocking(_next(items))) is not None:
            yield item
    finally:
        blocking(_close(items))


async def _next(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


async def across(caller: Caller, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the items of a generator to `caller`. The generator runs in the background event loop.

    At the end, or when the caller stops early, the generator is closed.
    """
    lock = asyncio.Lock()  # closing waits for the end of an interrupted step
    last: asyncio.Task[Any] | None = None

    async def step() -> T | None:
        nonlocal last
        last = asyncio.current_task()
        async with lock:
            return await anext(items, None)

    async def close() -> None:
        if last is not None:
            last.cancel()  # Ctrl-C may arrive before the caller waits for the step
        async with lock:
            await items.aclose()

    try:
        while (item := await caller.wait(step())) is not None:
            yield item
    finally:
        await caller.wait(close())
