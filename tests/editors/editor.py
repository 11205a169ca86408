"""A client that sees every message of the agent in its order: of a process, or of one in memory."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helexa.acp.config import Endpoint, Settings
from helexa.acp.protocol.server import serve

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

    def __init__(self, receive: Callable[[], Awaitable[Message | None]], send: Callable[[Any], None]) -> None:
        self._receive = receive
        self.send = send
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

    def updates(self, session_id: str | None = None, kind: str | None = None) -> list[Message]:
        """The updates that came, of a session and kind."""
        found = [message["params"] for message in self.received if message.get("method") == "session/update"]
        mine = [params["update"] for params in found if session_id in (None, params["sessionId"])]
        return [update for update in mine if kind in (None, update["sessionUpdate"])]

    def told(self, method: str) -> list[Message]:
        """The parameters of what the agent sent for a method."""
        return [message["params"] for message in self.received if message.get("method") == method]

    def text(self, session_id: str | None = None) -> str:
        """What the agent said."""
        return "".join(update["content"]["text"] for update in self.updates(session_id, "agent_message_chunk"))

    async def until(self, ready: Callable[[], Any]) -> Any:
        """Wait until something is true of what was received; what it is."""
        async with self._changed:
            await self._changed.wait_for(ready)
        return ready()

    def hold(self, method: str) -> asyncio.Future[int]:
        """Never answer requests of a method; the id of the first one that comes."""
        came: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def never(params: Message) -> Awaitable[Any]:
            asked = [message["id"] for message in self.received if message.get("method") == method]
            if not came.done():
                came.set_result(asked[-1])
            return asyncio.Event().wait()

        self.answers[method] = never
        return came

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

    async def read_all(self) -> None:
        """Wait until the agent has said its last."""
        await self._reader
        for task in self._tasks:
            task.cancel()

    async def _read(self) -> None:
        while (message := await self._receive()) is not None:
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


@dataclass
class AgentProcess:
    """A `helexa-acp` process and its client."""

    process: asyncio.subprocess.Process
    editor: Editor

    async def close(self) -> int:
        """End the connection; the exit code of the agent."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = await self.process.wait()
        await self.editor.read_all()
        return code


@asynccontextmanager
async def agent_process(home: Path, sdk: Path | None = None, **environ: str) -> AsyncIterator[AgentProcess]:
    """A `helexa-acp` process whose home is a folder of the test's, and with a wheel of the SDK instead of the installed
    one. Its stdout carries JSON-RPC and nothing else.
    """
    known = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    if sdk is not None:
        known["PYTHONPATH"] = os.pathsep.join([str(sdk), *filter(None, [known.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "helexa.acp",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=known | {"HOME": str(home)} | environ,
        limit=64 << 20,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    async def receive() -> Message | None:
        line = await stdout.readline()
        return json.loads(line) if line else None

    def send(message: Any) -> None:
        stdin.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    agent = AgentProcess(process, Editor(receive, send))
    try:
        yield agent
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await agent.editor.read_all()


class Memory:
    """One end of a connection within this process; messages are as JSON has them."""

    def __init__(self, inbox: asyncio.Queue[str | None], outbox: asyncio.Queue[str | None]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    async def receive(self) -> Any:
        text = await self._inbox.get()
        return None if text is None else json.loads(text)

    async def send(self, message: Any) -> None:
        self.post(message)

    def post(self, message: Any) -> None:
        self._outbox.put_nowait(json.dumps(message))

    async def close(self) -> None:
        self._outbox.put_nowait(None)


@asynccontextmanager
async def memory(settings: Settings | Callable[[], Settings]) -> AsyncIterator[Memory]:
    """The client's end of a connection to an agent in this process."""
    there: asyncio.Queue[str | None] = asyncio.Queue()
    back: asyncio.Queue[str | None] = asyncio.Queue()
    ours = Memory(back, there)
    load = settings if callable(settings) else lambda: settings
    agent = asyncio.create_task(serve(load, Memory(there, back)))
    try:
        yield ours
    finally:
        await ours.close()
        await agent


@asynccontextmanager
async def agent_in_memory(settings: Settings | Callable[[], Settings]) -> AsyncIterator[Editor]:
    """An agent in this process, and its client."""
    async with memory(settings) as end:
        editor = Editor(end.receive, end.post)
        yield editor
    await editor.read_all()


def settings_for(url: str, home: Path, **more: Any) -> Settings:
    """The configuration with one endpoint."""
    endpoint = Endpoint(**{"name": "default", "base_url": url, "default_model": "scripted"} | more)
    return Settings(endpoints=(endpoint,), default_endpoint="default", data_dir=home / "data")


def on(url: str) -> dict[str, str]:
    """The environment for one endpoint."""
    return {"HELEXA_ACP_BASE_URL": url, "HELEXA_ACP_MODEL": "scripted"}
