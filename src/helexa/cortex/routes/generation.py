"""`POST /v1/chat/completions` and `/v1/completions`: routed, forwarded, observed."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from helexa.core.errors import ApiError, internal_error, shutting_down
from helexa.cortex.exchange import Exchange
from helexa.cortex.gateway import Gateway
from helexa.cortex.question import ClientGone, parse_question, read_body
from helexa.cortex.reply import Reply

log = logging.getLogger(__name__)
completions = logging.getLogger("helexa.cortex.requests")

CLIENT_CLOSED_REQUEST = 499


class Generation:
    """The ASGI endpoint of all routes that make a model speak."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Every way out leads through one observation."""
        gateway: Gateway = scope["app"].state.gateway
        exchange, reply = Exchange(), Reply(scope, receive, send)
        failure: ApiError | None = None
        try:
            body = await read_body(receive, scope["headers"], gateway.max_body_bytes)
            question = parse_question(scope["path"], scope["headers"], body)
            await _while_connected(receive, gateway.proxy.answer(question, reply, exchange))
        except ClientGone:
            exchange.client_gone = True
            exchange.status = exchange.status or CLIENT_CLOSED_REQUEST
        except ApiError as error:
            failure = error
        except asyncio.CancelledError:  # only the server cancels us, when its patience with open streams ends
            failure = shutting_down()
        except Exception:
            log.exception("a fault in the gateway")
            failure = internal_error()
        if failure is not None:
            exchange.failed = True
            exchange.status = exchange.status or failure.status
        exchange.end()
        gateway.metrics.observe(exchange)
        completions.info("%s", exchange.summary())
        if failure is not None:
            await reply.abort(failure)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it at once when the client hangs up.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.create_task(work)
    hang_up = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((task, hang_up), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        hang_up.cancel()
        task.cancel()
        await asyncio.wait((task, hang_up))


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
