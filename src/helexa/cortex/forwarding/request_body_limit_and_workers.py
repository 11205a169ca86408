"""Receives request bodies within limits; worker processes parse large bodies.

Parsing a large body would block the event loop. Parsing in a thread would block it, too, because the JSON parser holds
the GIL.
"""

import asyncio
import gc
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from typing import Any, ParamSpec, TypeVar

from starlette.types import Receive

from helexa.core.errors import ApiError, invalid_body, overloaded, service_unavailable
from helexa.core.logs import quoted
from helexa.http.headers import Headers, require_json
from helexa.http.request_cycle_and_disconnects import ClientDisconnected

MAX_CONTAINERS = 500_000  # enough for 100,000 messages with 200,000 content parts

_TO_NEXT_CONTAINER = re.compile(rb'[^"{\[]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{\[]*+)*+[{\[]', re.DOTALL)

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

PROCESSES = 2
MAX_WAITING = 64
RETRY_SECS = 2

_SMALL_BYTES = 256 << 10
_MEDIUM_BYTES = 4 << 20
_MEDIUM_COMMAS = 10_000
_NICE = 5

MAX_JSON_BYTES = 256 << 10  # maximum length of the body of an administration request

_MIN_CHUNK_BYTES = 8 << 10


def check_containers(body: bytes) -> None:
    """Reject a JSON body with too many objects and arrays.

    The body is scanned once and not parsed. Brackets within strings are not counted. If the body is not valid JSON,
    only the bytes before the first syntax error are checked.

    Raises:
        ApiError: 400 `invalid_request_body`: the body has more than `MAX_CONTAINERS` objects and arrays.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS:
        return
    count, end = 0, 0
    while match := _TO_NEXT_CONTAINER.match(body, end):
        count, end = count + 1, match.end()
        if count > MAX_CONTAINERS:
            raise invalid_body(
                f"the request body has more than {MAX_CONTAINERS} objects and arrays; send fewer messages"
            )


class BodyWorkers:
    """A pool of at most `PROCESSES` worker processes, which start when needed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._free = asyncio.Semaphore(PROCESSES)
        self._waiting = 0

    async def run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `work` in a worker process, and return its result or raise its exception.

        The function, its arguments and its result must be picklable.

        Raises:
            ApiError: 503 because `MAX_WAITING` calls already wait for a process, or because the process died.
        """
        if self._waiting >= MAX_WAITING:
            raise overloaded(f"{MAX_WAITING} large requests already wait for a worker process; try again", RETRY_SECS)
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        pool = self._pool = self._pool or _new_pool()
        try:
            job = asyncio.wrap_future(pool.submit(work, *args, **options))
        except BaseException as error:
            self._free.release()
            raise self._pool_error(pool, error) from error
        job.add_done_callback(self._release)
        try:
            return await asyncio.shield(job)  # the process stays busy even if the client disconnects
        except BrokenProcessPool as error:
            raise self._pool_error(pool, error) from error

    async def run_if(self, large: bool, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `work` in a worker process if `large`, else here, and return its result."""
        return await self.run(work, *args, **options) if large else work(*args, **options)

    async def close(self) -> None:
        """Kill all worker processes. Call this only after the last request has ended."""
        pool = self._pool
        if pool is None:
            return
        for process in list((pool._processes or {}).values()):  # from Python 3.14 on: pool.kill_workers()
            process.kill()
        await asyncio.to_thread(pool.shutdown, cancel_futures=True)

    def _release(self, job: "asyncio.Future[Any]") -> None:
        self._free.release()
        if not job.cancelled():
            job.exception()  # marks the exception as retrieved, so that asyncio does not log it

    def _pool_error(self, pool: ProcessPoolExecutor, error: BaseException) -> BaseException:
        """Return the exception to raise after a call in the pool failed with `error`."""
        # A pool with a dead process is unusable. The next call of `run` creates a new one. `submit` raises an OSError
        # if a process dies while the pool starts another process, or if the system cannot start a process.
        if not isinstance(error, BrokenProcessPool | OSError):
            return error
        log.error(
            "worker process for large requests died error=%s; the next large request starts another", quoted(error)
        )
        if self._pool is pool:
            self._pool = None
        return service_unavailable("the gateway's worker process for this request died; try again", RETRY_SECS)


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(PROCESSES, get_context("spawn"), initializer=_prepare)


def _prepare() -> None:
    """Set signal handlers, priority and garbage collection of a new worker process."""
    # The gateway handles Ctrl-C and ends its processes itself. SIGTERM must end this process: if one process of the
    # pool dies, the pool sends SIGTERM to the others and waits for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(_NICE)  # gives priority to the process with the event loop, if there are few processors
    gc.disable()  # JSON values contain no cycles, and each collection would scan millions of values
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def is_large(body: bytes) -> bool:
    """Return whether parsing `body` would block the event loop for too long."""
    size = len(body)
    # A body of few long strings, such as an image, is parsed fast even if it has megabytes. Many commas mean many
    # values, which take much longer.
    return size > _SMALL_BYTES and (size > _MEDIUM_BYTES or body.count(b",") > _MEDIUM_COMMAS)


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """Receive the whole body of a client's request, and return its bytes.

    Raises:
        ApiError: 413: longer than `limit` bytes. 408: the client stops sending. 503: the memory for bodies is used up.
        ClientDisconnected: the client disconnected before the end of the body.
    """
    length = dict(headers).get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            message = await receive()
        except TimeoutError:
            raise ApiError(
                408, "request_timeout", "the rest of the request body did not arrive in time; send the request again"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message["body"]
        if size + len(chunk) > limit:
            raise _too_large(limit)
        size += len(chunk)
        if chunks and len(chunks[-1]) < _MIN_CHUNK_BYTES:  # joined, because many small chunks use much more memory
            chunks[-1] += chunk
        else:
            chunks.append(chunk)
        if not message["more_body"]:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_json_body(receive: Receive, headers: Headers) -> bytes:
    """Receive the body of an administration request, at most `MAX_JSON_BYTES` bytes.

    Raises:
        ApiError: 400 if the client disconnects; 415 if the headers do not describe uncompressed JSON. Also the errors
            of `read_body`.
    """
    require_json(headers)
    return await read_small_body(receive, headers)


async def read_small_body(receive: Receive, headers: Headers) -> bytes:
    """Receive a body of at most `MAX_JSON_BYTES` bytes and any content type.

    Raises:
        ApiError: 400 if the client disconnects. Also the errors of `read_body`.
    """
    try:
        return await read_body(receive, headers, MAX_JSON_BYTES)
    except ClientDisconnected:
        raise ApiError(400, "client_disconnected", "the client disconnected while sending its request") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        "request_too_large",
        f"the request body is larger than {limit} bytes; shorten it"
        + ("" if limit == MAX_JSON_BYTES else ", or raise gateway.max_body_mb in cortex.toml"),
    )
