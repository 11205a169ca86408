"""Waits for a model to load, and sends progress comments to streaming clients during the load."""

import asyncio
from collections.abc import Awaitable, Callable

from helexa.cortex.lifecycle.load_job import Progress
from helexa.cortex.replies.reply import Reply
from helexa.cortex.requests.headers import UNBUFFERED
from helexa.cortex.routing.router import WarmRoute
from helexa.http.connections.request_head import Headers

KEEP_ALIVE_AFTER_SECS = 3.0
KEEP_ALIVE_SECS = 1.0

_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    UNBUFFERED,
]


async def wait_for_load(
    work: Awaitable[WarmRoute], progress: Callable[[], Progress | None], stream: bool, response: Reply
) -> WarmRoute:
    """Wait until a model is loaded, and return the node that serves the model.

    A streaming client receives SSE comments with the load progress. The first comment is sent after
    `KEEP_ALIVE_AFTER_SECS`, and further comments every `KEEP_ALIVE_SECS`.

    Args:
        work: awaitable that loads the model and returns the node.
        progress: function that returns the current load progress, or None if it is unknown.
        stream: True if the client requests a stream.
        response: the response to the client.
    """
    task = asyncio.ensure_future(work)
    try:
        timeout_secs = KEEP_ALIVE_AFTER_SECS if stream else None
        while not (await asyncio.wait((task,), timeout=timeout_secs))[0]:
            if not response.started:
                await response.start(200, _EVENT_STREAM, streamed=True)
            await response.write(b": %s\n\n" % _progress_text(progress()))
            timeout_secs = KEEP_ALIVE_SECS
        return task.result()
    finally:
        task.cancel()


def _progress_text(progress: Progress | None) -> bytes:
    if progress is None:
        return b"loading"
    text = "loading" if progress.fraction is None else f"loading, {progress.fraction:.0%}"
    return (text if progress.eta_secs is None else f"{text}, about {progress.eta_secs:.0f} s left").encode()
