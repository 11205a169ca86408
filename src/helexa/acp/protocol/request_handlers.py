"""Handles requests that need a configuration: sessions, prompts, settings."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ClassVar, cast

from helexa.acp.config import Mode, Settings
from helexa.acp.protocol.capabilities import ClientCapabilities
from helexa.acp.protocol.editor_requests_and_always_allow import EditorClient
from helexa.acp.protocol.json_rpc import current_request, invalid_params, not_found
from helexa.acp.protocol.prompts_updates_and_replay import read_prompt
from helexa.acp.protocol.session import Session
from helexa.acp.protocol.session_options import TEMPERATURES, is_mode, is_thought_level, modes
from helexa.acp.protocol.sessions import Sessions, describe
from helexa.acp.protocol.slash_commands import COMMANDS, find_command
from helexa.acp.providers.models import Models
from helexa.acp.providers.requests_and_events import ThoughtLevel
from helexa.acp.tools.mcp import HttpServer, McpServer, StdioServer

logger = logging.getLogger(__name__)
MODELS_WAIT_S, FIRST_MODELS_WAIT_S = 3.0, 15.0
MODELS_TIMEOUT_S = 30.0
MODELS_MAX_AGE_S = 60.0
_MAX_ERRORS = 3

Result = dict[str, Any]


class Agent:
    """Handles the session requests of the editor with one configuration.

    The constructor needs a running event loop, because it starts to read the lists of models. Call `close` at the end.
    """

    # Name of the SDK's class for the parameters of each method.
    METHODS: ClassVar[dict[str, str]] = {
        "session/new": "NewSessionRequest",
        "session/load": "LoadSessionRequest",
        "session/resume": "ResumeSessionRequest",
        "session/list": "ListSessionsRequest",
        "session/close": "CloseSessionRequest",
        "session/delete": "DeleteSessionRequest",
        "session/prompt": "PromptRequest",
        "session/cancel": "CancelNotification",
        "session/set_mode": "SetSessionModeRequest",
        "session/set_config_option": "SetSessionConfigOptionSelectRequest",
    }

    def __init__(self, settings: Settings, client: EditorClient, capabilities: ClientCapabilities) -> None:
        self._models = Models(settings)
        self._client = client
        self._sessions = Sessions(settings, self._models, client, capabilities)
        self._tasks: set[asyncio.Task[None]] = set()
        self._models_read_at = float("-inf")
        self._models_task = self._run_in_background(self._refresh_models())

    async def handle(self, method: str, params: Result) -> Result:
        """Handle a request of `METHODS` and return the `result` of the JSON-RPC response.

        Raises:
            RpcError: the parameters are invalid, or the request failed.
        """
        request = _parse(self.METHODS[method], params)
        handler: Callable[[Any], Awaitable[Result]] = {
            "session/new": self._new,
            "session/load": self._load,
            "session/resume": self._resume,
            "session/list": self._list,
            "session/close": self._close,
            "session/delete": self._delete,
            "session/prompt": self._prompt,
            "session/cancel": self._cancel,
            "session/set_mode": self._set_mode,
            "session/set_config_option": self._set_config_option,
        }[method]
        return await handler(request)

    async def close(self) -> None:
        """Close all sessions and cancel all background tasks."""
        await self._sessions.close_all()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._models.close()

    async def _new(self, request: Any) -> Result:
        await self._wait_for_models()
        session = await self._sessions.new(
            request.cwd, request.additional_directories or (), _servers(request.mcp_servers)
        )
        self._announce_session(session)
        return {"sessionId": session.id, **_setup(session)}

    async def _load(self, request: Any) -> Result:
        session = await self._restored(request)
        await session.replay()
        return _setup(session)

    async def _resume(self, request: Any) -> Result:
        return _setup(await self._restored(request))

    async def _list(self, request: Any) -> Result:
        lines, cursor = await self._sessions.list(request.cwd, request.cursor)
        result: Result = {"sessions": [describe(line) for line in lines]}
        return result if cursor is None else result | {"nextCursor": cursor}

    async def _close(self, request: Any) -> Result:
        # A saved session that is not open counts as closed. Only an unknown id is an error.
        if not self._sessions.is_known(request.session_id):
            raise not_found(request.session_id)
        await self._sessions.close(request.session_id)
        return {}

    async def _delete(self, request: Any) -> Result:
        await self._sessions.delete(request.session_id)
        return {}

    async def _prompt(self, request: Any) -> Result:
        session = self._sessions.find(request.session_id)
        parts = read_prompt(request.prompt)
        # A default model can be the first model in an endpoint's list of models, so wait until the lists are read.
        if session.assumed:
            await asyncio.wait({self._models_task}, timeout=FIRST_MODELS_WAIT_S)
        match find_command(parts):
            case None:
                stopped = await session.prompt(lambda: session.run_agent(parts))
            case command, argument:
                stopped = await session.prompt(lambda: command.run(session, argument))
        return {"stopReason": stopped}

    async def _cancel(self, request: Any) -> Result:
        await self._sessions.find(request.session_id).cancel()
        return {}

    async def _set_mode(self, request: Any) -> Result:
        session = self._sessions.find(request.session_id)
        await self._choose(session, "mode", request.mode_id)
        return {}

    async def _set_config_option(self, request: Any) -> Result:
        session = self._sessions.find(request.session_id)
        await self._choose(session, request.config_id, request.value)
        return {"configOptions": session.options()}

    async def _choose(self, session: Session, option: str, value: str) -> None:
        match option:
            case "mode" if is_mode(value):
                await session.choose(mode=cast(Mode, value))
                self._send_after_response(session.send_choices)
            case "model":
                try:
                    choice = self._models.parse(value)
                except ValueError as error:
                    raise invalid_params(str(error)) from None
                await self._wait_for_models()
                if (selection_error := self._models.selection_error(choice)) is not None:
                    raise invalid_params(selection_error)
                await session.choose(model=choice)
            case "thought_level" if is_thought_level(value):
                await session.choose(thought_level=cast(ThoughtLevel, value))
            case "temperature" if value in TEMPERATURES:
                await session.choose(temperature=TEMPERATURES[value][1])
            case "mode" | "thought_level" | "temperature":
                raise invalid_params(f"{option} cannot be {value[:100]!r}; choose one of the offered values")
            case _:
                raise invalid_params(
                    f"there is no option {option[:100]!r}; there are: mode, model, thought_level, temperature"
                )

    async def _restored(self, request: Any) -> Session:
        await self._wait_for_models()
        session = await self._sessions.restore(
            request.session_id, request.cwd, request.additional_directories or (), _servers(request.mcp_servers or ())
        )
        self._announce_session(session)
        return session

    def _announce_session(self, session: Session) -> None:
        """After the response, release the updates of an opened session and announce it."""
        # The response contains the session's id, which the editor must know before it receives updates.
        if (request := current_request()) is not None:
            request.after_response.append(session.release)
        self._send_after_response(lambda: session.announce(COMMANDS))

    def _send_after_response(self, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if (request := current_request()) is not None:
            request.after_response.append(lambda: self._run_in_background(send()) and None)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._log_failure)
        return task

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning(
                "background task failed error=%r; the session stays usable", f"{type(error).__name__}: {error}"
            )

    async def _wait_for_models(self) -> None:
        if self._models_task.done() and time.monotonic() > self._models_read_at + MODELS_MAX_AGE_S:
            self._models_task = self._run_in_background(self._refresh_models())
        # Wait longer if no model is known yet, because a session without a model would be useless.
        timeout = FIRST_MODELS_WAIT_S if self._models.default() is None else MODELS_WAIT_S
        await asyncio.wait({self._models_task}, timeout=timeout)

    async def _refresh_models(self) -> None:
        previous = self._models.listed()
        await self._models.refresh(MODELS_TIMEOUT_S)
        self._models_read_at = time.monotonic()
        if self._models.listed() != previous:
            await self._sessions.send_models()


def _parse(model: str, params: Result) -> Any:
    """Return the parameters of a request as an instance of SDK class `model`."""
    from acp import schema
    from pydantic import ValidationError

    # The SDK's classes require `mcpServers`. A request without this field is accepted and gets no MCP servers.
    if model in ("NewSessionRequest", "LoadSessionRequest"):
        params = {"mcpServers": [], **params}
    try:
        return getattr(schema, model).model_validate(params)
    except ValidationError as validation_error:
        errors = validation_error.errors(include_input=False, include_url=False, include_context=False)[:_MAX_ERRORS]
        messages = (f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)
        raise invalid_params("; ".join(messages)) from None


def _servers(configured: Sequence[Any]) -> list[McpServer]:
    servers: list[McpServer] = []
    for server in configured:
        match getattr(server, "type", "stdio"):
            case "stdio":
                env = {variable.name: variable.value for variable in server.env}
                servers.append(StdioServer(server.name, server.command, tuple(server.args), env))
            case "http" | "sse" as transport:
                headers = {header.name: header.value for header in server.headers}
                servers.append(HttpServer(server.name, server.url, transport, headers))
            case other:
                raise invalid_params(f"MCP servers with transport {other!r} are not supported; use stdio, http or sse")
    return servers


def _setup(session: Session) -> Result:
    return {"modes": modes(session.choices), "configOptions": session.options()}
