"""Checks of large request bodies, and the worker processes that run them.

Large bodies would block the event loop. A thread would block it too, because parsing JSON holds the GIL.
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

import orjson

from helexa.core.errors import ApiError, invalid_body, overloaded, service_unavailable
from helexa.cortex.upstream.usage_meter import BYTES_PER_TOKEN

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


# Bytes of the longest token in common vocabularies: 128 spaces, in those of Llama 3, Qwen 2.5 and Qwen 3.
MAX_BYTES_PER_TOKEN = 128
_MESSAGE_BYTES = 8


def check_prompt(body: bytes, context: int) -> None:
    """Reject a prompt that is longer than `context` tokens, whatever the tokenizer.

    Raises:
        ApiError: 400 `context_length_exceeded`. The error contains the size in bytes and an estimated token count.
    """
    # The gateway does not know the exact token count: one token can be four bytes of English, one digit, or 128 spaces.
    # It therefore assumes `MAX_BYTES_PER_TOKEN` bytes per token, and accepts prompts that might fit. The node counts
    # the tokens and may still reject the prompt.
    max_bytes = MAX_BYTES_PER_TOKEN * context
    if len(body) > max_bytes and (size := prompt_bytes(body)) > max_bytes:
        estimate = size // BYTES_PER_TOKEN
        raise ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {context} tokens. However, your messages have {size} bytes of "
            f"text, an estimated {estimate} tokens. Please reduce the length of the messages.",
            param="messages",
            max=context,
            estimated_prompt_tokens=estimate,
        )


def prompt_bytes(body: bytes) -> int:
    """Return the bytes of text in a prompt, plus eight bytes per message or item.

    If the request has several prompts or embedding texts, the length of the longest one is returned. Token ids and
    images count as 0 bytes. The result is 0 if the body is not valid JSON.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 0
    messages, prompt, input_items = content.get("messages"), content.get("prompt"), content.get("input")
    if isinstance(input_items, str):
        input_items = [{"content": input_items}]
    if isinstance(messages, list):
        return _message_bytes(messages)
    if isinstance(prompt, str | list):
        return _longest_text_bytes(prompt)
    if isinstance(input_items, list) and any(isinstance(item, dict) for item in input_items):
        instructions = [{"content": content["instructions"]}] if content.get("instructions") else []
        return _message_bytes(instructions + input_items)
    return _longest_text_bytes(input_items) if isinstance(input_items, list) else 0


def _message_bytes(messages: list[Any]) -> int:
    return sum(_MESSAGE_BYTES + _text_bytes(message) for message in messages)


def _longest_text_bytes(prompt: str | list[Any]) -> int:
    texts = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
    return max((len(text.encode()) for text in texts), default=0)


def _text_bytes(message: Any) -> int:
    """Return the bytes of text in a message, or in an input item of Responses."""
    content = message.get("content") or message.get("output") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content.encode())
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(len(text.encode()) for text in texts if isinstance(text, str))


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
            raise overloaded("too many large requests wait for a worker process; try again", RETRY_SECS)
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
        """Kill all worker processes, after the last request has ended."""
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
        # A pool with a dead process is unusable. The next call of `run` creates a new one.
        if not isinstance(error, BrokenProcessPool):
            return error
        log.error("a worker process for large requests died, the next large request starts another")
        if self._pool is pool:
            self._pool = None
        return service_unavailable("the worker process for this request died; try again", RETRY_SECS)


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(PROCESSES, get_context("spawn"), initializer=_prepare)


def _prepare() -> None:
    """Set signal handlers, priority and garbage collection of a new worker process."""
    # The gateway handles Ctrl-C and ends its processes itself. SIGTERM must end this process: if one process of the
    # pool dies, the pool sends SIGTERM to the others and waits for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(_NICE)  # the event loop has priority if there are few processors
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
