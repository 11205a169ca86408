"""Locks of model files in use or in download, and threads that read slow files."""

import contextvars
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from helexa.core.errors import HelexaError, service_unavailable

_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK  # opening must not wait if the file is a FIFO

P = ParamSpec("P")
T = TypeVar("T")

_RETRY_AFTER_SECONDS = 30


class FileThreads:
    """Runs functions that read files, each in its own thread.

    The caller waits for the thread at most `seconds`, and may be canceled at any time. In both cases, the thread runs
    on and still counts toward `limit`, the maximum number of threads.
    """

    # The number of threads is limited because a hung network mount blocks each thread that reads from it.
    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._running = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a new thread with the caller's context variables.

        Raises:
            ApiError: status 503: all threads are in use.
            HelexaError: the function has not returned within the time limit.
        """
        import asyncio  # imported only here: engine processes use only this module's locks, and start faster

        if self._running >= self._limit:
            raise service_unavailable(
                f"{self._limit} model loads are still reading files; retry in {_RETRY_AFTER_SECONDS} s, "
                "or check that the disks of the models respond",
                _RETRY_AFTER_SECONDS,
            )
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def finish(result: T | None, error: BaseException | None) -> None:
            self._running -= 1
            if outcome.done():
                return
            if error is None:
                outcome.set_result(result)  # pyright: ignore[reportArgumentType]
            else:
                outcome.set_exception(error)

        def work() -> None:
            result, raised = None, None
            try:
                result = context.run(function, *args, **kwargs)
            except BaseException as error:
                raised = error
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(finish, result, raised)

        threading.Thread(target=work, name="model files", daemon=True).start()
        self._running += 1
        try:
            if not (await asyncio.wait([outcome], timeout=self._seconds))[0]:
                raise HelexaError(
                    f"the model's files could not be read within {self._seconds:g} s; check that the file system of "
                    "the files responds"
                )
            return outcome.result()
        finally:
            outcome.cancel()


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock on a file; return False if another process has a lock.

    The lock ends when `descriptor` is closed. Return True on file systems that do not support locks. On NFS, the
    descriptor must be writable.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def mark_used(model: Path) -> None:
    """Take a shared lock on a model's file or folder until this process ends.

    The function does nothing on file systems that do not support locks.
    """
    with suppress(OSError):
        # The descriptor stays open. The lock is released when the process ends.
        descriptor = os.open(model, os.O_RDONLY | _FLAGS)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_used(model: Path) -> bool:
    """Return whether an engine process has locked a model with `mark_used`."""
    try:
        try:
            descriptor = os.open(model, os.O_RDWR | _FLAGS)  # NFS needs a writable descriptor for an exclusive lock
        except OSError:  # a folder, or a file that this user cannot write
            descriptor = os.open(model, os.O_RDONLY | _FLAGS)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
