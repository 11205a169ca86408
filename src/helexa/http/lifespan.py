"""Startup and shutdown of an ASGI application."""

import asyncio

from starlette.types import ASGIApp, Message

from helexa.core.errors import HelexaError

_RETURN_SECS = 1.0


class Lifespan:
    """Sends the ASGI lifespan events to an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._told: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Return when the application is ready.

        Raises:
            HelexaError: the application reported a failed startup. Exceptions of the application propagate unchanged.
        """
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self._task = asyncio.ensure_future(self._run(scope))
        await self._tell("startup")

    async def end(self) -> None:
        """Return when the application has shut down.

        Raises:
            HelexaError: the application reported a failed shutdown. Exceptions of the application propagate unchanged.
        """
        await self._tell("shutdown")
        assert self._task is not None
        await asyncio.wait((self._task,), timeout=_RETURN_SECS)

    async def _run(self, scope: Message) -> None:
        await self._app(scope, self._told.get, self._answers.put)

    async def _tell(self, what: str) -> None:
        assert self._task is not None
        self._told.put_nowait({"type": f"lifespan.{what}"})
        answer = asyncio.ensure_future(self._answers.get())
        await asyncio.wait((answer, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            self._task.result()
            raise HelexaError(f"the application ended before its {what}")
        message = answer.result()
        if message["type"] != f"lifespan.{what}.complete":
            raise HelexaError(message.get("message") or f"the application failed at its {what}")
