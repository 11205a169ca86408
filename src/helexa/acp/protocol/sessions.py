"""The sessions that a client opens, closes, lists and deletes."""

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

from helexa.acp.agent.turn import Choices
from helexa.acp.config import Mode, Settings
from helexa.acp.preferences import Preferences
from helexa.acp.protocol import config_options
from helexa.acp.protocol.client import EditorClient
from helexa.acp.protocol.initialize import Abilities
from helexa.acp.protocol.permissions import Permissions
from helexa.acp.protocol.rejection import Refusal, internal_error, invalid_params, not_found
from helexa.acp.protocol.session import Session
from helexa.acp.providers.models import Models
from helexa.acp.providers.provider import ThoughtLevel
from helexa.acp.store import SESSION_ID, Head, Journal, SavedSession, SessionLine, Store, StoreError
from helexa.acp.tools.mcp.server import McpServer
from helexa.acp.tools.tool import ToolContext

logger = logging.getLogger(__name__)
MOST_OPEN = 100
MOST_DIRECTORIES = 100


class Sessions:
    """All open sessions of one connection, with access to the saved sessions."""

    def __init__(self, settings: Settings, models: Models, client: EditorClient, abilities: Abilities) -> None:
        self._settings = settings
        self._models = models
        self._client = client
        self._abilities = abilities
        self._store = Store(settings.data_dir)
        self._preferences = Preferences(settings.data_dir)
        self._open: dict[str, Session] = {}  # least recently used first

    def find(self, id: str) -> Session:
        """Return an open session.

        Raises:
            Refusal: the session is not open.
        """
        session = self._open.pop(id, None)
        if session is None:
            raise not_found(id)
        self._open[id] = session
        return session

    async def new(self, cwd: str, directories: Sequence[str], servers: Sequence[McpServer]) -> Session:
        """Create a session.

        Raises:
            Refusal: a folder is invalid, no model is known, or the session cannot be saved.
        """
        folders = _folders(cwd, directories)
        choices, assumed = self._choices(SavedSession(Head("", cwd, 0.0)))
        id = str(uuid.uuid4())
        try:
            journal = await asyncio.to_thread(self._store.create, id, cwd, directories)
            saved = await asyncio.to_thread(journal.read)
        except StoreError as error:
            raise internal_error(str(error)) from None
        session = await self._add(saved, journal, choices, folders, servers)
        session.assumed = assumed
        return session

    async def restore(self, id: str, cwd: str, directories: Sequence[str], servers: Sequence[McpServer]) -> Session:
        """Open a saved session; an open session is closed first.

        Raises:
            Refusal: the session is unknown or cannot be read.
        """
        folders = _folders(cwd, directories)
        if not SESSION_ID.fullmatch(id):
            raise not_found(id)
        await self.close(id)
        journal = self._store.open(id)
        try:
            saved = await asyncio.to_thread(journal.read)
        except FileNotFoundError:
            raise not_found(id) from None
        except (OSError, StoreError) as error:
            raise internal_error(f"the session cannot be read: {error}") from None
        if saved.damaged:
            logger.warning("session %s: %d lines cannot be read", id, saved.damaged)
        choices, assumed = self._choices(saved)
        session = await self._add(saved, journal, choices, folders, servers)
        session.assumed = assumed
        return session

    async def list(self, cwd: str | None, cursor: str | None) -> tuple[Sequence[SessionLine], str | None]:
        """Return a page of the saved sessions, and the cursor of the next page or None.

        Raises:
            Refusal: the cursor is invalid.
        """
        try:
            return await asyncio.to_thread(self._store.page, cwd, cursor)
        except ValueError as error:
            raise invalid_params(str(error)) from None

    async def close(self, id: str) -> None:
        """Close a session if it is open; its log stays on disk."""
        session = self._open.pop(id, None)
        if session is not None:
            with contextlib.suppress(Exception):  # errors of its tools do not matter here
                await session.close()

    def is_known(self, id: str) -> bool:
        """Return whether the session exists, open or saved."""
        return SESSION_ID.fullmatch(id) is not None and self._store.open(id).exists()

    async def delete(self, id: str) -> None:
        """Delete a session permanently. Unknown sessions are ignored.

        Raises:
            Refusal: the session cannot be deleted.
        """
        await self.close(id)
        if SESSION_ID.fullmatch(id):
            try:
                await asyncio.to_thread(self._store.delete, id)
            except StoreError as error:
                raise internal_error(str(error)) from None

    async def models_found(self) -> None:
        """Send newly found models to all sessions. Sessions with an assumed model switch to the default."""
        for session in self._open.values():
            if session.assumed and (default := self._models.default()) is not None:
                session.choices.model = default
        await asyncio.gather(*(session.say_options() for session in self._open.values()))

    async def close_all(self) -> None:
        """Close every session."""
        await asyncio.gather(*(self.close(id) for id in list(self._open)))

    def _choices(self, saved: SavedSession) -> tuple[Choices, bool]:
        """Return the initial choices of a session, and whether its model is only the default."""
        remembered = self._preferences.read(saved.head.cwd)
        chosen = saved.chosen
        model = (chosen.model if chosen else None) or remembered.model
        mode = chosen.mode if chosen else remembered.mode
        thinking = chosen.thought_level if chosen else remembered.thought_level
        wanted = self._models.parse(model) if model else None
        assumed = wanted is None or wanted.endpoint not in self._models.listed()
        if assumed:
            wanted = self._models.default()
        if wanted is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._models.failures().items())
            raise internal_error(
                f"no model is known. Set default_model of an endpoint, or HELEXA_ACP_MODEL. {reasons}".strip()
            )
        choices = Choices(
            model=wanted,
            mode=cast(Mode, mode) if config_options.is_mode(mode) else self._settings.default_mode,
            thought_level=cast(ThoughtLevel, thinking) if config_options.is_thought_level(thinking) else "default",
            temperature=chosen.temperature if chosen else remembered.temperature,
        )
        return choices, assumed

    async def _add(
        self,
        saved: SavedSession,
        journal: Journal,
        choices: Choices,
        folders: tuple[Path, ...],
        servers: Sequence[McpServer],
    ) -> Session:
        from helexa.acp.host.client import open_host
        from helexa.acp.tools.toolbox import open_toolbox

        await self._make_room()
        id, cwd = saved.head.id, saved.head.cwd
        plan_dir = self._plan_dir(cwd)
        secrets = [endpoint.api_key for endpoint in self._settings.endpoints if endpoint.api_key]

        context = ToolContext(
            session_id=id,
            cwd=folders[0],
            roots=folders,
            plan_dir=plan_dir,
            host=open_host(self._client, id, private=[plan_dir], secrets=secrets),
            settings=self._settings,
        )
        self._open[id] = session = Session(
            saved,
            journal,
            choices,
            settings=self._settings,
            models=self._models,
            toolbox=await open_toolbox(context, servers),
            context=context,
            permissions=Permissions(id, cwd, self._client, self._preferences),
            preferences=self._preferences,
            abilities=self._abilities,
            send=functools.partial(self._client.update, id),
        )
        return session

    def _plan_dir(self, cwd: str) -> Path:
        mark = hashlib.sha256(os.fsencode(cwd)).hexdigest()[:8]
        return self._settings.data_dir / "plans" / f"{Path(cwd).name or 'root'}-{mark}"

    async def _make_room(self) -> None:
        if len(self._open) < MOST_OPEN:
            return
        idle = next((id for id, session in self._open.items() if not session.busy), None)
        if idle is None:
            raise Refusal(-32603, f"{MOST_OPEN} sessions are at work; close one first")
        await self.close(idle)


def _folders(cwd: str, directories: Sequence[str]) -> tuple[Path, ...]:
    if len(directories) > MOST_DIRECTORIES:
        raise invalid_params(f"there may be {MOST_DIRECTORIES} additional directories")
    return tuple(dict.fromkeys(_folder(path) for path in (cwd, *directories)))


def _folder(text: str) -> Path:
    try:
        path = Path(text)
        if not path.is_absolute():
            raise invalid_params(f"{text[:200]!r} must be an absolute path")
        if not path.is_dir():
            raise invalid_params(f"{text[:200]!r} is no folder")
    except (OSError, ValueError, RuntimeError):
        raise invalid_params(f"{text[:200]!r} cannot be read as a folder") from None
    return path


def describe(line: SessionLine) -> dict[str, Any]:
    """Return a session as in the result of `session/list`."""
    info: dict[str, Any] = {"sessionId": line.head.id, "cwd": line.head.cwd, "updatedAt": line.updated_at}
    if line.title:
        info["title"] = line.title
    if line.head.directories:
        info["additionalDirectories"] = list(line.head.directories)
    return info
