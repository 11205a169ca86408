"""The one event loop of this library, in a thread of its own, and the two ways to wait for what runs there.

Engines, connections and every request live in that loop, whoever asks: plain functions block their thread until it is
done, coroutines wait for it in whatever loop they run in. So nothing nests, and both share the same engine.
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
    """The loop, and what lives in it.

    Attributes:
        targets: where prompts are answered; to be used in the loop only.
    """

    def __init__(self) -> None:
        self.targets = Targets()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="helexa", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run `work` there.

        Raises:
            RuntimeError: this is the thread of the loop, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a callback that runs in helexa's own loop may not call back into helexa")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """End everything, within a bounded time."""
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
    """The loop of this process, started when it is first needed."""
    global _running  # noqa: PLW0603
    with _lock:
        if _running is None:
            _running = Background()
        return _running


def shut_down() -> None:
    """End the loop and the engines; what is asked next starts new ones."""
    global _running
    with _lock:
        loop_thread, _running = _running, None
    if loop_thread is not None:
        loop_thread.end()


def _forget() -> None:
    """A forked child has no threads: the loop, and the engines, are its parent's."""
    global _running, _lock
    _running, _lock = None, threading.Lock()


atexit.register(shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Caller(Protocol):
    """The side that waits."""

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of `work`, which runs in the background; an interruption cancels it there."""
        ...

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call somebody's function, plain or not, on this side."""
        ...


class Blocking:
    """A plain function, which blocks its thread; its coroutines never really wait, see `blocking`."""

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """See `Caller`."""
        future = background().submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # does nothing unless Ctrl-C came while it ran

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """See `Caller`; what the callback awaits runs in the background."""
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await self.wait(_awaited(result))


class Awaiting:
    """A coroutine in a loop of its own."""

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """See `Caller`."""
        return await asyncio.wrap_future(background().submit(work))

    async def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """See `Caller`."""
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing but a `Blocking` caller."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("a blocking call must not await anything itself")


def blocking_each(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """The items of a generator that waits for nothing but a `Blocking` caller."""
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
    """The items of a generator that lives in the background, one at a time, and its end there with ours."""
    lock = asyncio.Lock()  # closing waits until an interrupted step is over
    last: asyncio.Task[Any] | None = None

    async def step() -> T | None:
        nonlocal last
        last = asyncio.current_task()
        async with lock:
            return await anext(items, None)

    async def close() -> None:
        if last is not None:
            last.cancel()  # Ctrl-C may have come before the caller could wait for it, and so without ending it
        async with lock:
            await items.aclose()

    try:
        while (item := await caller.wait(step())) is not None:
            yield item
    finally:
        await caller.wait(close())
