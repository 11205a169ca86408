"""An ACP client that records every message of the agent, which runs as a process or in memory."""

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
Handler = Callable[[Message], Awaitable[Any] | Any]
CAPABILITIES: Message = {
    "fs": {"readTextFile": True, "writeTextFile": True},
    "session": {"notices": {}, "compaction": {}},
}


class ErrorResponse(Exception):
    """An error response of the agent."""

    def __init__(self, error: Message) -> None:
        super().__init__(error["message"])
        self.error = error


class Editor:
    """One connection.

    Attributes:
        received: every message of the agent, oldest first.
        handlers: functions that return the result of the agent's requests, by method. An exception of a handler
            becomes an error response.
    """

    def __init__(self, receive: Callable[[], Awaitable[Message | None]], send: Callable[[Any], None]) -> None:
        self._receive = receive
        self.send = send
        self.received: list[Message] = []
        self.handlers: dict[str, Handler] = {
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
        """Return the received updates, optionally only of one session or kind."""
        notifications = [message["params"] for message in self.received if message.get("method") == "session/update"]
        matching_session = [params["update"] for params in notifications if session_id in (None, params["sessionId"])]
        return [update for update in matching_session if kind in (None, update["sessionUpdate"])]

    def requests(self, method: str) -> list[Message]:
        """Return the parameters of the agent's requests and notifications with a method."""
        return [message["params"] for message in self.received if message.get("method") == method]

    def text(self, session_id: str | None = None) -> str:
        """Return the text of the agent's messages."""
        return "".join(update["content"]["text"] for update in self.updates(session_id, "agent_message_chunk"))

    async def until(self, ready: Callable[[], Any]) -> Any:
        """Wait until `ready()` is true, which is checked after each received message; return its value."""
        async with self._changed:
            await self._changed.wait_for(ready)
        return ready()

    def hold(self, method: str) -> asyncio.Future[int]:
        """Leave requests of a method without a response; the returned future is the id of the first request."""
        first_id: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def wait_forever(params: Message) -> Awaitable[Any]:
            ids = [message["id"] for message in self.received if message.get("method") == method]
            if not first_id.done():
                first_id.set_result(ids[-1])
            return asyncio.Event().wait()

        self.handlers[method] = wait_forever
        return first_id

    def start(self, method: str, **params: Any) -> tuple[int, asyncio.Future[Message]]:
        """Send a request; return its id and a future of its response."""
        self._next_id += 1
        id = self._next_id
        self._waiting[id] = asyncio.get_running_loop().create_future()
        self.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
        return id, self._waiting[id]

    async def request(self, method: str, **params: Any) -> Any:
        """Send a request and return its result.

        Raises:
            ErrorResponse: the agent sent an error response.
        """
        _, waiting = self.start(method, **params)
        response = await waiting
        if "error" in response:
            raise ErrorResponse(response["error"])
        return response["result"]

    def notify(self, method: str, **params: Any) -> None:
        """Send a notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    async def initialize(self, **capabilities: Any) -> Message:
        return await self.request(
            "initialize", protocolVersion=1, clientCapabilities=CAPABILITIES | capabilities, clientInfo={"name": "t"}
        )

    async def new(self, cwd: Path, **params: Any) -> str:
        """Open a session and return its id."""
        return (await self.request("session/new", cwd=str(cwd), mcpServers=[], **params))["sessionId"]

    async def prompt(self, session_id: str, text: str) -> str:
        """Send a prompt and return the stop reason."""
        prompt = [{"type": "text", "text": text}]
        return (await self.request("session/prompt", sessionId=session_id, prompt=prompt))["stopReason"]

    async def read_all(self) -> None:
        """Wait until the agent has closed the connection."""
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
                task = asyncio.create_task(self._respond(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": {"code": 0, "message": "the agent is gone"}})

    async def _respond(self, message: Message) -> None:
        handler = self.handlers.get(message["method"])
        response: Message = {"jsonrpc": "2.0", "id": message["id"]}
        try:
            if handler is None:
                raise NotImplementedError(f"Method not found: {message['method']}")
            result = handler(message["params"])
            if isinstance(result, Awaitable):
                result = await result
            response["result"] = result
        except Exception as error:
            code = -32601 if isinstance(error, NotImplementedError) else -32603
            response["error"] = {"code": code, "message": str(error)}
        self.send(response)


def allow(params: Message, kind: str = "allow_once") -> Message:
    """Return the response in which the user selects the option of a kind."""
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
        """Close the agent's stdin, and return its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = await self.process.wait()
        await self.editor.read_all()
        return code


@asynccontextmanager
async def agent_process(home: Path, sdk: Path | None = None, **environ: str) -> AsyncIterator[AgentProcess]:
    """Start a `helexa-acp` process with its client.

    Args:
        home: home directory of the process.
        sdk: wheel of the SDK to use instead of the installed SDK, or None.
        environ: further environment variables.
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
    """One end of a connection within this process. Messages are encoded as JSON, as on a real connection."""

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
    """Start an agent in this process; return the client's end of the connection."""
    to_agent: asyncio.Queue[str | None] = asyncio.Queue()
    to_client: asyncio.Queue[str | None] = asyncio.Queue()
    ours = Memory(to_client, to_agent)
    load = settings if callable(settings) else lambda: settings
    agent = asyncio.create_task(serve(load, Memory(to_agent, to_client)))
    try:
        yield ours
    finally:
        await ours.close()
        await agent


@asynccontextmanager
async def agent_in_memory(settings: Settings | Callable[[], Settings]) -> AsyncIterator[Editor]:
    """Start an agent in this process; return its client."""
    async with memory(settings) as end:
        editor = Editor(end.receive, end.post)
        yield editor
    await editor.read_all()


def settings_for(url: str, home: Path, **options: Any) -> Settings:
    """Return a configuration with one endpoint."""
    endpoint = Endpoint(**{"name": "default", "base_url": url, "default_model": "scripted"} | options)
    return Settings(endpoints=(endpoint,), default_endpoint="default", data_dir=home / "data")


def endpoint_environment(url: str) -> dict[str, str]:
    """Return the environment variables that configure one endpoint."""
    return {"HELEXA_ACP_BASE_URL": url, "HELEXA_ACP_MODEL": "scripted"}
