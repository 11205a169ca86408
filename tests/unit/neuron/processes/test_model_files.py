"""Threads that read model files, of which some hang."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from helexa.core.errors import ApiError, HelexaError
from helexa.core.logs import request_id
from helexa.neuron.processes.file_locks_and_threads import FileThreads


@asynccontextmanager
async def hung_reads(threads: FileThreads, count: int) -> AsyncIterator[list["asyncio.Task[bool]"]]:
    """Start `count` reads that do not end before the context does."""
    responds, started = threading.Event(), threading.Semaphore(0)

    def read() -> bool:
        started.release()
        return responds.wait(60)

    tasks = [asyncio.create_task(threads.run(read)) for _ in range(count)]
    for _ in tasks:
        await asyncio.to_thread(started.acquire, timeout=60)
    try:
        yield tasks
    finally:
        responds.set()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_threads_for_file_reads_pass_on_results_errors_and_context_variables() -> None:
    threads = FileThreads(2, 60)
    token = request_id.set("r-1")
    assert await threads.run(request_id.get) == "r-1"
    request_id.reset(token)
    with pytest.raises(TimeoutError, match="mine"):
        await threads.run(_raise, TimeoutError("mine"))
    assert await threads.run(int, "7") == 7


def _raise(error: Exception) -> None:
    raise error


async def test_file_reads_that_hang_leave_the_default_thread_pool_free() -> None:
    threads = FileThreads(40, 60)
    async with hung_reads(threads, 39):
        assert await asyncio.to_thread(lambda: 1) == 1
        assert await threads.run(lambda: 2) == 2


async def test_file_read_is_rejected_while_all_threads_for_file_reads_hang() -> None:
    threads = FileThreads(2, 60)
    async with hung_reads(threads, 2) as tasks:
        with pytest.raises(ApiError) as rejected:
            await threads.run(int)
        assert (rejected.value.status, rejected.value.retry_after) == (503, 30)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert tasks[0].cancelled()
        with pytest.raises(ApiError):  # the thread still exists
            await threads.run(int)
    while True:  # the threads end
        try:
            assert await threads.run(int) == 0
            return
        except ApiError:
            await asyncio.sleep(0.01)


async def test_file_read_beyond_the_time_limit_is_an_error() -> None:
    async with hung_reads(FileThreads(1, 0.05), 1) as [task]:
        with pytest.raises(HelexaError, match=r"within 0\.05 s; check that the file system of the files responds"):
            await task
