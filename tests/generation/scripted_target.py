"""A target that answers as a test says, in the library's own loop."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable

from helexa.core.errors import service_unavailable
from helexa.generation.completion import Delta, Usage
from helexa.generation.errors import InvalidRequestError, generation_error
from helexa.generation.request import Request
from helexa.generation.target import End, Event
from helexa.generation.targets import ModelLocation

_serial = itertools.count()


class ScriptedTarget:
    """Answers a prompt with its own words. What a prompt starts with says what becomes of it:

    wait     after one piece nothing more comes, until it is cancelled, which is counted
    bad      is refused
    crash    fails in a way that may be escaped by asking again, and takes all that run beside it along
    late     is answered only when all others are
    """

    name = "script"
    width = 4

    def __init__(self) -> None:
        self.place = ModelLocation(model=f"scripted-{next(_serial)}")
        self.requests: list[Request] = []
        self.running = self.most = self.cancelled = self.crashes = 0
        self.asked = threading.Event()
        self.before: Callable[[str], None] = lambda prompt: None
        self._crash = asyncio.Event()
        self._others: dict[int, asyncio.Event] = {}

    async def open(self, on_progress: object = None, holder: object = None) -> None:
        pass

    async def close(self, holder: object) -> None:
        pass

    async def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        prompt = request.messages[-1]["content"]
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        crash = self._crash
        try:
            self.before(prompt)
            words = prompt.split()
            yield Delta(words[0])
            self.asked.set()
            if words[0] == "wait":
                await asyncio.Event().wait()
            if words[0] == "bad":
                raise InvalidRequestError("it is bad")
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
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
