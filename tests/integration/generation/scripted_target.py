"""A target whose behavior is selected by each prompt."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable

from helexa.core.errors import service_unavailable
from helexa.generation.completion import Delta, Usage
from helexa.generation.errors import InvalidRequestError, generation_error
from helexa.generation.request import Request
from helexa.generation.target import End, Event
from helexa.generation.target_choice import ModelLocation

_serial = itertools.count()


class ScriptedTarget:
    """A target that repeats the words of the prompt. The first word can change the behavior:

    wait     yield one piece, then wait for cancellation
    bad      fail with `InvalidRequestError`
    crash    fail with a retryable error, together with all running requests
    late     complete after all other requests

    Attributes:
        requests: all requests, oldest first.
        running, max_running: number of running requests, and its maximum.
        canceled, crashes: number of canceled requests, and of `crash` prompts.
        started: set when the first request has yielded a piece.
        on_request: called with each prompt before it runs.
    """

    name = "script"
    width = 4

    def __init__(self) -> None:
        self.location = ModelLocation(model=f"scripted-{next(_serial)}")
        self.requests: list[Request] = []
        self.running = self.max_running = self.canceled = self.crashes = 0
        self.started = threading.Event()
        self.on_request: Callable[[str], None] = lambda prompt: None
        self._crash = asyncio.Event()

    async def open(self, on_progress: object = None, holder: object = None) -> None:
        pass

    async def close(self, holder: object) -> None:
        pass

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        prompt = request.messages[-1]["content"]
        self.requests.append(request)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        crash = self._crash
        try:
            self.on_request(prompt)
            words = prompt.split()
            yield Delta(words[0])
            self.started.set()
            if words[0] == "wait":
                await asyncio.Event().wait()
            if words[0] == "bad":
                raise InvalidRequestError("bad prompt")
            if words[0] == "crash":
                self.crashes += 1
                self._crash = asyncio.Event()
                crash.set()
            while words[0] == "late" and (self.running > 1 or len(self.requests) < 2):  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.sleep(0)
                if crash.is_set():
                    raise generation_error(service_unavailable("the engine is gone", 1))
            for word in words[1:]:
                yield Delta(f" {word}")
            usage = Usage(prompt=1, completion=len(words))
            yield End(reason="stop", model="scripted", usage=usage)
        except (GeneratorExit, asyncio.CancelledError):
            self.canceled += 1
            raise
        finally:
            self.running -= 1
