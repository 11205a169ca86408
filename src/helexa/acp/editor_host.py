"""Access to files and shell commands through the client (the editor)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helexa.acp.host import (
    MAX_FILE_BYTES,
    PAGER_ENVIRONMENT,
    Client,
    CommandResult,
    Host,
    HostError,
    LocalHost,
    check_size,
    shell,
)

_LOG = logging.getLogger(__name__)
_RESPONSE_SECONDS = 10.0  # timeout of requests that the client handles without asking its user
_USER_SECONDS = 600.0  # timeout of requests for which the client may ask its user


def open_host(client: Client, session_id: str, *, private: Iterable[Path] = (), secrets: Collection[str] = ()) -> Host:
    """Return the `Host` of a session, through which tools access files and commands.

    Args:
        client: the editor. Operations that the editor does not support are done on this machine.
        private: folders of the agent itself. Their files are always accessed directly, not through the editor.
        secrets: secret values. Commands on this machine do not inherit environment variables with these values.
    """
    local = LocalHost(secrets)
    if client.reads_files or client.writes_files or client.runs_commands:
        return ClientHost(client, session_id, local, private)
    return local


class ClientHost:
    """Accesses files and runs commands through the editor.

    Operations that the editor does not support are done on this machine.
    """

    def __init__(self, client: Client, session_id: str, local: LocalHost, private: Iterable[Path] = ()) -> None:
        self._client = client
        self._session_id = session_id
        self._local = local
        self._private = tuple(private)
        self._releasing: set[asyncio.Task[None]] = set()

    async def read_text(self, path: Path, *, line: int | None = None, limit: int | None = None) -> str:
        """Return a file's text. The editor reads the file if it supports this; see `Host`."""
        if not self._client.reads_files or self._is_private(path):
            return await self._local.read_text(path, line=line, limit=limit)
        check_size(path)
        line_range = {name: value for name, value in (("line", line), ("limit", limit)) if value is not None}
        response = await self._request("fs/read_text_file", {"path": str(path), **line_range}, _USER_SECONDS)
        text = _text(response, "content")
        if len(text) > MAX_FILE_BYTES:
            raise HostError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; read parts of it with a shell command")
        return text

    async def read_bytes(self, path: Path) -> bytes:
        """Return the contents of a file on this machine; see `Host`."""
        return await self._local.read_bytes(path)

    async def write_text(self, path: Path, text: str) -> None:
        """Create or replace a text file, through the editor if supported; see `Host`."""
        if not self._client.writes_files or self._is_private(path):
            await self._local.write_text(path, text)
            return
        await self._request("fs/write_text_file", {"path": str(path), "content": text}, _USER_SECONDS)

    async def run(
        self,
        command: str,
        *,
        cwd: Path,
        timeout_s: float,
        output_limit: int,
        started: Callable[[str | None], Awaitable[None]],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> CommandResult:
        """Run a shell command, in a terminal of the editor if supported; see `Host`."""
        if not self._client.runs_commands:
            return await self._local.run(
                command,
                cwd=cwd,
                timeout_s=timeout_s,
                output_limit=output_limit,
                started=started,
                environment=environment,
            )
        terminal_id = await self._create(command, cwd, output_limit, PAGER_ENVIRONMENT | dict(environment))
        try:
            await started(terminal_id)
            status = await self._wait_for_exit(terminal_id, timeout_s)
            if status is None:
                await self._request("terminal/kill", {"terminalId": terminal_id}, _RESPONSE_SECONDS)
            response = await self._request("terminal/output", {"terminalId": terminal_id}, _RESPONSE_SECONDS)
        except BaseException:
            self._run_in_background(self._release(terminal_id))  # not awaited, because a canceled call must end at once
            raise
        await self._release(terminal_id)
        exit_code, signal = (status or {}).get("exitCode"), (status or {}).get("signal")
        return CommandResult(
            exit_code=exit_code if isinstance(exit_code, int) else None,
            signal=signal if isinstance(signal, str) else None,
            output=_text(response, "output"),
            truncated=response.get("truncated") is True,
            timed_out=status is None,
        )

    async def _create(self, command: str, cwd: Path, output_limit: int, environment: Mapping[str, str]) -> str:
        program, *args = shell(command)
        request = asyncio.ensure_future(
            self._request(
                "terminal/create",
                {
                    "command": program,
                    "args": args,
                    "cwd": str(cwd),
                    "env": [{"name": name, "value": value} for name, value in environment.items()],
                    "outputByteLimit": output_limit,
                },
                _USER_SECONDS,
            )
        )
        try:
            return _text(await asyncio.shield(request), "terminalId")
        except asyncio.CancelledError:
            self._run_in_background(self._release_created(request))
            raise

    async def _wait_for_exit(self, terminal_id: str, seconds: float) -> dict[str, Any] | None:
        """Return the exit status of a terminal's command, or None if `seconds` pass first."""
        try:
            return await self._request("terminal/wait_for_exit", {"terminalId": terminal_id}, seconds)
        except _ClientTimeout:
            return None

    async def _release(self, terminal_id: str) -> None:
        try:
            await self._request("terminal/release", {"terminalId": terminal_id}, _RESPONSE_SECONDS)
        except HostError as error:
            _LOG.warning(
                "terminal not released session=%s terminal=%s error=%r; the editor may keep the terminal",
                self._session_id,
                terminal_id,
                str(error),
            )

    async def _release_created(self, request: asyncio.Future[dict[str, Any]]) -> None:
        with suppress(HostError):
            await self._release(_text(await request, "terminalId"))

    async def _request(self, method: str, params: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                return await self._client.request(method, {"sessionId": self._session_id, **params})
        except TimeoutError as error:
            raise _ClientTimeout(
                f"the editor did not answer {method} within {seconds:g} s; try again, or ask the user"
            ) from error

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _is_private(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._private)


class _ClientTimeout(HostError):
    """The editor did not respond to a request in time."""


def _text(response: dict[str, Any], name: str) -> str:
    text = response.get(name)
    if not isinstance(text, str):
        raise HostError(f"the editor's response has no {name}; use another tool, or ask the user to update the editor")
    return text
