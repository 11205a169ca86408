"""The sessions that the editor opens, closes, lists and deletes."""

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from helexa.acp.agent.context_and_compaction import Choices
from helexa.acp.config import Mode, Settings
from helexa.acp.preferences import Preferences
from helexa.acp.protocol.capabilities import ClientCapabilities
from helexa.acp.protocol.editor_requests_and_always_allow import EditorClient, Permissions
from helexa.acp.protocol.json_rpc import RpcError, internal_error, invalid_params, not_found
from helexa.acp.protocol.session import Session
from helexa.acp.protocol.session_options import is_mode, is_thought_level
from helexa.acp.providers.models import Models
from helexa.acp.providers.requests_and_events import ThoughtLevel
from helexa.acp.session_store import SESSION_ID, Head, SavedSession, SessionEntry, SessionLog, Store, StoreError
from helexa.acp.tools.mcp import McpServer
from helexa.acp.tools.tool_and_effects import ToolContext

logger = logging.getLogger(__name__)
MAX_OPEN_SESSIONS = 100
MAX_DIRECTORIES = 100


class Sessions:
    """Opens, lists, closes and deletes the sessions of one editor, which are on disk."""

    def __init__(
        self, settings: Settings, models: Models, client: EditorClient, capabilities: ClientCapabilities
    ) -> None:
        self._settings = settings
        self._models = models
        self._client = client
        self._capabilities = capabilities
        self._store = Store(settings.data_dir)
        self._preferences = Preferences(settings.data_dir)
        self._open: dict[str, Session] = {}  # least recently used first

    def find(self, id: str) -> Session:
        """Return the open session with this id, and mark it as the most recently used.

        Raises:
            RpcError: no session with this id is open.
        """
        session = self._open.pop(id, None)
        if session is None:
            raise not_found(id)
        self._open[id] = session
        return session

    async def new(self, cwd: str, directories: Sequence[str], servers: Sequence[McpServer]) -> Session:
        """Create and open a session.

        If `MAX_OPEN_SESSIONS` sessions are open, first close one that is not busy with a prompt.

        Args:
            cwd: working directory, an absolute path.
            directories: additional folders that the agent may access.
            servers: MCP servers, whose tools the session can use.

        Raises:
            RpcError: a folder is invalid, no model is known, saving failed, or too many sessions are busy.
        """
        folders = _folders(cwd, directories)
        choices, assumed = self._choices(SavedSession(Head("", cwd, 0.0)))
        id = str(uuid.uuid4())
        try:
            session_log = await asyncio.to_thread(self._store.create, id, cwd, directories)
            saved = await asyncio.to_thread(session_log.read)
        except StoreError as error:
            raise internal_error(str(error)) from None
        session = await self._add(saved, session_log, choices, folders, servers)
        session.assumed = assumed
        logger.info("session created session=%s cwd=%r model=%s", id, cwd, choices.model)
        return session

    async def restore(self, id: str, cwd: str, directories: Sequence[str], servers: Sequence[McpServer]) -> Session:
        """Open a saved session. If the session is already open, it is closed first.

        The arguments are those of `new`.

        Raises:
            RpcError: the session is unknown or cannot be read, or for a reason that `new` names.
        """
        folders = _folders(cwd, directories)
        if not SESSION_ID.fullmatch(id):
            raise not_found(id)
        await self.close(id)
        session_log = self._store.open(id)
        try:
            saved = await asyncio.to_thread(session_log.read)
        except FileNotFoundError:
            raise not_found(id) from None
        except (OSError, StoreError) as error:
            raise internal_error(f"the session {id} cannot be read: {error}; start a new session") from None
        if saved.unreadable_lines:
            logger.warning(
                "unreadable lines in the session log session=%s lines=%d; these lines were skipped",
                id,
                saved.unreadable_lines,
            )
        choices, assumed = self._choices(saved)
        session = await self._add(saved, session_log, choices, folders, servers)
        session.assumed = assumed
        logger.info("session restored session=%s cwd=%r model=%s", id, cwd, choices.model)
        return session

    async def list(self, cwd: str | None, cursor: str | None) -> tuple[Sequence[SessionEntry], str | None]:
        """Return a page of the saved sessions, and the cursor of the next page.

        The cursor is None if this page is the last.

        Args:
            cwd: list only sessions with this working directory, or all sessions if None.
            cursor: cursor from the previous page, or None for the first page.

        Raises:
            RpcError: the cursor is invalid.
        """
        try:
            return await asyncio.to_thread(self._store.page, cwd, cursor)
        except ValueError as error:
            raise invalid_params(str(error)) from None

    async def close(self, id: str) -> None:
        """Close a session if it is open. The saved conversation stays on disk."""
        session = self._open.pop(id, None)
        if session is not None:
            with contextlib.suppress(Exception):  # ignore errors of closing tools
                await session.close()

    def is_known(self, id: str) -> bool:
        """Return whether a session with this id, open or closed, is saved on disk."""
        return SESSION_ID.fullmatch(id) is not None and self._store.open(id).exists()

    async def delete(self, id: str) -> None:
        """Close a session and delete it from disk, if it exists.

        Raises:
            RpcError: the session cannot be deleted.
        """
        await self.close(id)
        if SESSION_ID.fullmatch(id):
            try:
                await asyncio.to_thread(self._store.delete, id)
            except StoreError as error:
                raise internal_error(str(error)) from None

    async def send_models(self) -> None:
        """Send the current list of models to the editor for each open session.

        If the user has not chosen a session's model, the session first switches to the default model.
        """
        for session in self._open.values():
            if session.assumed and (default := self._models.default()) is not None:
                session.choices.model = default
        await asyncio.gather(*(session.send_options() for session in self._open.values()))

    async def close_all(self) -> None:
        """Close every session."""
        await asyncio.gather(*(self.close(id) for id in list(self._open)))

    def _choices(self, saved: SavedSession) -> tuple[Choices, bool]:
        """Return the choices for a session to open, and whether the model is a default.

        The choices saved in the session take precedence over the project's preferences.
        """
        remembered = self._preferences.read(saved.head.cwd)
        saved_choices = saved.choices
        model = (saved_choices.model if saved_choices else None) or remembered.model
        mode = saved_choices.mode if saved_choices else remembered.mode
        thinking = saved_choices.thought_level if saved_choices else remembered.thought_level
        model_choice = self._models.parse(model) if model else None
        assumed = model_choice is None or model_choice.endpoint not in self._models.listed()
        if assumed:
            model_choice = self._models.default()
        if model_choice is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._models.failures().items())
            raise internal_error(
                f"no model is known; set default_model of an endpoint, or HELEXA_ACP_MODEL. {reasons}".strip()
            )
        choices = Choices(
            model=model_choice,
            mode=cast(Mode, mode) if is_mode(mode) else self._settings.default_mode,
            thought_level=cast(ThoughtLevel, thinking) if is_thought_level(thinking) else "default",
            temperature=saved_choices.temperature if saved_choices else remembered.temperature,
        )
        return choices, assumed

    async def _add(
        self,
        saved: SavedSession,
        session_log: SessionLog,
        choices: Choices,
        folders: tuple[Path, ...],
        servers: Sequence[McpServer],
    ) -> Session:
        from helexa.acp.editor_host import open_host
        from helexa.acp.tools.toolbox import open_toolbox

        await self._close_idle_session()
        id, cwd = saved.head.id, saved.head.cwd
        plan_dir = self._plan_dir(cwd)
        secrets = [endpoint.api_key for endpoint in self._settings.endpoints if endpoint.api_key]

        context = ToolContext(
            session_id=id,
            cwd=folders[0],
            roots=folders,
            plan_dir=plan_dir,
            host=open_host(self._client.for_sessions, id, private=[plan_dir], secrets=secrets),
            settings=self._settings,
        )
        self._open[id] = session = Session(
            saved,
            session_log,
            choices,
            settings=self._settings,
            models=self._models,
            toolbox=await open_toolbox(context, servers),
            context=context,
            permissions=Permissions(id, cwd, self._client.for_sessions, self._preferences),
            preferences=self._preferences,
            capabilities=self._capabilities,
            send=functools.partial(self._client.update, id),
        )
        return session

    def _plan_dir(self, cwd: str) -> Path:
        digest = hashlib.sha256(os.fsencode(cwd)).hexdigest()[:8]
        return self._settings.data_dir / "plans" / f"{Path(cwd).name or 'root'}-{digest}"

    async def _close_idle_session(self) -> None:
        if len(self._open) < MAX_OPEN_SESSIONS:
            return
        idle = next((id for id, session in self._open.items() if not session.busy), None)
        if idle is None:
            raise RpcError(
                -32603,
                f"all {MAX_OPEN_SESSIONS} sessions that can be open are busy with a prompt; close a session first",
            )
        await self.close(idle)


def _folders(cwd: str, directories: Sequence[str]) -> tuple[Path, ...]:
    if len(directories) > MAX_DIRECTORIES:
        raise invalid_params(f"{len(directories)} additional directories are too many; send at most {MAX_DIRECTORIES}")
    return tuple(dict.fromkeys(_folder(path) for path in (cwd, *directories)))


def _folder(text: str) -> Path:
    try:
        path = Path(text)
        if not path.is_absolute():
            raise invalid_params(f"{text[:200]!r} is not an absolute path; send a path such as '/home/me/project'")
        if not path.is_dir():
            raise invalid_params(f"{text[:200]!r} is not a folder; open an existing folder")
    except (OSError, ValueError, RuntimeError):
        raise invalid_params(f"{text[:200]!r} cannot be read as a folder; check the permissions of this path") from None
    return path


def describe(entry: SessionEntry) -> dict[str, Any]:
    """Return the entry of a saved session in the result of `session/list`."""
    info: dict[str, Any] = {"sessionId": entry.head.id, "cwd": entry.head.cwd, "updatedAt": entry.updated_at}
    if entry.title:
        info["title"] = entry.title
    if entry.head.directories:
        info["additionalDirectories"] = list(entry.head.directories)
    return info
