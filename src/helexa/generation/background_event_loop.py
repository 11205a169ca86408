"""The library's background event loop, and how callers wait for its results.

All engines, connections and requests belong to the background event loop. A plain function of the library blocks the
user's thread until the result is ready. An async function of the library awaits the result in the user's event loop.
With this design, plain functions also work in a thread that already runs an event loop, and both kinds of functions
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
from typing import Any, TypeVar

from helexa.generation.target_choice import Targets

T = TypeVar("T")

_ENDING_SECONDS = 10.0


class BackgroundLoop:
    """The background event loop, its thread, and its engines and connections.

    Attributes:
        targets: the servers and private engines that this process uses. Only code in the background event loop may
            access them.
    """

    def __init__(self) -> None:
        self.targets = Targets()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="helexa", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start `work` in the background event loop, and return a future for its result.

        Raises:
            RuntimeError: the caller runs in the background thread itself. If it waited for the future, it would block
                the event loop that computes the result.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a callback in helexa's event loop must not call helexa; call helexa in another thread")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """Close all engines and connections, cancel all tasks, and stop the thread.

        The method waits at most `_ENDING_SECONDS` for the engines, and as long for the thread.
        """
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


_running: BackgroundLoop | None = None
_lock = threading.Lock()


def background() -> BackgroundLoop:
    """Return the background event loop of this process. The first call starts it."""
    global _running  # noqa: PLW0603
    with _lock:
        if _running is None:
            _running = BackgroundLoop()
        return _running


def shut_down() -> None:
    """Stop the background event loop and all engines.

    The next request starts them again.
    """
    global _running
    with _lock:
        loop_thread, _running = _running, None
    if loop_thread is not None:
        loop_thread.end()


def _forget() -> None:
    """Drop the reference to the background event loop in a forked child process.

    The thread of the event loop does not exist in the child process, and the engines belong to the parent process.
    """
    global _running, _lock
    _running, _lock = None, threading.Lock()


atexit.register(shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class BlockingCaller:
    """The `Caller` for plain functions: waiting blocks the thread.

    A coroutine that waits only with this class never suspends. The function `blocking` can run such a coroutine without
    an event loop.
    """

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Block the thread until `work` has ended, and return its result."""
        future = background().submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # has an effect only if Ctrl-C interrupted the wait

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call the callback in this thread.

        If it is async, run its coroutine in the background event loop.
        """
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await self.wait(_awaited(result))


class AsyncCaller:
    """The `Caller` for async functions: waiting suspends the coroutine."""

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the result of `work` in the background event loop."""
        return await asyncio.wrap_future(background().submit(work))

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call the callback. If it is async, await its result in the user's event loop."""
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await result


Caller = BlockingCaller | AsyncCaller
"""How library code waits for the event loop, and calls the user's callbacks.

The code of a library function is a coroutine that waits only with a `Caller`, so its plain and its async version share
the code.
"""


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that only awaits the background event loop; return its result.

    The coroutine may wait only with a `BlockingCaller`. If it waits in another way, RuntimeError is raised.
    """
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("a coroutine that `blocking` runs must wait only with its `BlockingCaller`")


def blocking_each(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Run an async generator that only awaits the background loop; yield its items.

    The generator may wait only with a `BlockingCaller`. An item that is None ends the iteration.
    """
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
    """Run an async generator in the background, and yield its items to the caller.

    `items` is closed after the last item, or as soon as the caller takes no more items. An item that is None counts as
    the end.
    """
    lock = asyncio.Lock()  # held during a step, so that `close` waits for the end of an interrupted step
    last: asyncio.Task[Any] | None = None

    async def step() -> T | None:
        nonlocal last
        last = asyncio.current_task()
        async with lock:
            return await anext(items, None)

    async def close() -> None:
        if last is not None:
            # If Ctrl-C arrives before the caller waits for the step, the step keeps running until this call cancels it.
            last.cancel()
        async with lock:
            await items.aclose()

    try:
        while (item := await caller.wait(step())) is not None:
            yield item
    finally:
        await caller.wait(close())
