"""Starts and shuts down an ASGI application with the ASGI lifespan protocol."""

import asyncio

from starlette.types import ASGIApp, Message

from helexa.core.errors import HelexaError

_RETURN_SECS = 1.0


class Lifespan:
    """Sends lifespan events (startup, shutdown) to an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._acknowledgements: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the application and wait until it is ready.

        Exceptions that the application raises are not caught.

        Raises:
            HelexaError: the application reported that its startup failed.
        """
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self._task = asyncio.ensure_future(self._run(scope))
        await self._send_event("startup")

    async def end(self) -> None:
        """Shut the application down and wait until its shutdown is complete.

        Exceptions that the application raises are not caught.

        Raises:
            HelexaError: the application reported that its shutdown failed.
        """
        await self._send_event("shutdown")
        assert self._task is not None
        await asyncio.wait((self._task,), timeout=_RETURN_SECS)

    async def _run(self, scope: Message) -> None:
        await self._app(scope, self._events.get, self._acknowledgements.put)

    async def _send_event(self, phase: str) -> None:
        assert self._task is not None
        self._events.put_nowait({"type": f"lifespan.{phase}"})
        acknowledgement = asyncio.ensure_future(self._acknowledgements.get())
        await asyncio.wait((acknowledgement, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not acknowledgement.done():
            acknowledgement.cancel()
            self._task.result()
            raise HelexaError(f"the application ended during {phase}")
        message = acknowledgement.result()
        if message["type"] != f"lifespan.{phase}.complete":
            raise HelexaError(message.get("message") or f"the application failed during {phase}")
