"""A client that speaks JSON lines to a `helexa-acp` process, and sees every message in its order."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Answer = Callable[[Message], Awaitable[Any] | Any]
CAPABILITIES: Message = {
    "fs": {"readTextFile": True, "writeTextFile": True},
    "session": {"notices": {}, "compaction": {}},
}


class Refused(Exception):
    """An error response of the agent."""

    def __init__(self, error: Message) -> None:
        super().__init__(error["message"])
        self.error = error


class Editor:
    """One connection.

    Attributes:
        received: every message of the agent, oldest first.
        answers: what to answer to requests of the agent, by method; an exception is an error response.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.received: list[Message] = []
        self.answers: dict[str, Answer] = {
            "session/request_permission": allow,
            "fs/read_text_file": _read,
            "fs/write_text_file": _write,
        }
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self.process.pid

    def updates(self, session_id: str | None = None, kind: str | None = None) -> list[Message]:
        """The updates that came, of a session and kind."""
        found = [message["params"] for message in self.received if message.get("method") == "session/update"]
        mine = [params["update"] for params in found if session_id in (None, params["sessionId"])]
        return [update for update in mine if kind in (None, update["sessionUpdate"])]

    def text(self, session_id: str | None = None) -> str:
        """What the agent said."""
        return "".join(update["content"]["text"] for update in self.updates(session_id, "agent_message_chunk"))

    async def until(self, ready: Callable[[], Any]) -> Any:
        """Wait until something is true of what was received; what it is."""
        async with self._changed:
            await self._changed.wait_for(ready)
        return ready()

    def start(self, method: str, **params: Any) -> tuple[int, asyncio.Future[Message]]:
        """Send a request; its id and its response."""
        self._next_id += 1
        id = self._next_id
        self._waiting[id] = asyncio.get_running_loop().create_future()
        self.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
        return id, self._waiting[id]

    async def ask(self, method: str, **params: Any) -> Any:
        """Send a request and wait for its result."""
        _, waiting = self.start(method, **params)
        response = await waiting
        if "error" in response:
            raise Refused(response["error"])
        return response["result"]

    def tell(self, method: str, **params: Any) -> None:
        """Send a notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def send(self, message: Any) -> None:
        """Send any JSON; bytes go as they are."""
        assert self.process.stdin is not None
        self.process.stdin.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    async def initialize(self, **capabilities: Any) -> Message:
        return await self.ask(
            "initialize", protocolVersion=1, clientCapabilities=CAPABILITIES | capabilities, clientInfo={"name": "t"}
        )

    async def new(self, cwd: Path, **params: Any) -> str:
        """Open a session; its id."""
        return (await self.ask("session/new", cwd=str(cwd), mcpServers=[], **params))["sessionId"]

    async def prompt(self, session_id: str, text: str) -> str:
        """Ask the agent; the reason why it stopped."""
        prompt = [{"type": "text", "text": text}]
        return (await self.ask("session/prompt", sessionId=session_id, prompt=prompt))["stopReason"]

    async def close(self) -> int:
        """End the connection; the exit code of the agent."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = await self.process.wait()
        await self._reader
        return code

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            message = json.loads(line)  # stdout carries nothing else
            assert message["jsonrpc"] == "2.0"
            async with self._changed:
                self.received.append(message)
                self._changed.notify_all()
            if "method" not in message:
                waiting = self._waiting.pop(message["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            elif "id" in message:
                task = asyncio.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": {"code": 0, "message": "the agent is gone"}})

    async def _answer(self, message: Message) -> None:
        answer = self.answers.get(message["method"])
        response: Message = {"jsonrpc": "2.0", "id": message["id"]}
        try:
            if answer is None:
                raise NotImplementedError(f"Method not found: {message['method']}")
            result = answer(message["params"])
            if isinstance(result, Awaitable):
                result = await result
            response["result"] = result
        except Exception as error:
            code = -32601 if isinstance(error, NotImplementedError) else -32603
            response["error"] = {"code": code, "message": str(error)}
        self.send(response)


def allow(params: Message, kind: str = "allow_once") -> Message:
    """Choose the option of a kind, as the user would."""
    option = next(option for option in params["options"] if option["kind"] == kind)
    return {"outcome": {"outcome": "selected", "optionId": option["optionId"]}}


def _read(params: Message) -> Message:
    lines = Path(params["path"]).read_text().splitlines(keepends=True)
    start = (params.get("line") or 1) - 1
    limit = params.get("limit")
    return {"content": "".join(lines[start : start + limit if limit else None])}


def _write(params: Message) -> None:
    Path(params["path"]).write_text(params["content"])


@asynccontextmanager
async def agent_process(home: Path, **environ: str) -> AsyncIterator[Editor]:
    """A `helexa-acp` process whose home is a folder of the test's."""
    known = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "helexa.acp",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=known | {"HOME": str(home)} | environ,
        limit=64 << 20,
    )
    editor = Editor(process)
    try:
        yield editor
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await editor._reader


def on(url: str) -> dict[str, str]:
    """The environment for one endpoint."""
    return {"HELEXA_ACP_BASE_URL": url, "HELEXA_ACP_MODEL": "scripted"}
