"""The library's background event loop, which runs in a separate thread, and how callers wait for its results.

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
from typing import Any, Protocol, TypeVar

from helexa.generation.targets import Targets

T = TypeVar("T")

_ENDING_SECONDS = 10.0


class BackgroundLoop:
    """The library's background event loop, its thread, and the engines and connections that belong to it.

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
            raise RuntimeError("a callback in helexa's event loop must not call helexa; call it in another thread")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """Close all engines and connections, cancel all tasks, and stop the thread. This takes a bounded time."""
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
    """Stop the background event loop and all engines. The next request starts them again."""
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


class Caller(Protocol):
    """How library code waits for results of the background event loop and calls the user's callbacks.

    `BlockingCaller` implements it for plain functions, `AsyncCaller` for async functions. The code of a library
    function is a coroutine that waits only with a `Caller`, so both versions of the function can share it.
    """

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the background event loop, wait for it, and return its result.

        If the wait is interrupted, for example by Ctrl-C, `work` is canceled.
        """
        ...

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call a callback that the user passed. If the callback is async, also wait for its result."""
        ...


class BlockingCaller:
    """The `Caller` for plain functions: waiting blocks the thread.

    A coroutine that waits only with this class never suspends. The function `blocking` can run such a coroutine without
    an event loop.
    """

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Block the thread until `work` has ended in the background event loop, and return its result."""
        future = background().submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # has an effect only if Ctrl-C interrupted the wait

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call the callback in this thread. If it is async, run its coroutine in the background event loop."""
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await self.wait(_awaited(result))


class AsyncCaller:
    """The `Caller` for async functions: waiting suspends the coroutine in the user's event loop."""

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the result of `work`, which runs in the background event loop; see `Caller`."""
        return await asyncio.wrap_future(background().submit(work))

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call the callback. If it is async, await its result in the user's event loop."""
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine without an event loop and return its result.

    The coroutine may wait only with a `BlockingCaller`.
    """
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("a blocking call must not await anything itself")


def blocking_each(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Run an async generator without an event loop and yield its items.

    The generator may wait only with a `BlockingCaller`.
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
    """Run the async generator `items` in the background event loop, and yield its items in the caller's thread.

    `items` is closed after the last item, or as soon as the caller takes no more items.
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
