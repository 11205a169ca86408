"""Stores sessions on disk, each as an append-only log file of JSON lines."""

import base64
import binascii
import fcntl
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from helexa.acp.conversation_and_events import Message, encode

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
PAGE_SIZE = 50
_MAX_HEAD_BYTES = 64 << 10
_TITLE_MARK = b'\n{"type":"title"'


class StoreError(Exception):
    """A session cannot be read or written. The error message is shown to the user."""


class Head(Struct, frozen=True, tag="head"):
    """The first line of a stored session's log file."""

    id: str  # session id
    cwd: str  # absolute path of the session's working directory
    created: float  # creation time in seconds since 1970
    directories: tuple[str, ...] = ()  # absolute paths of additional folders that the agent may access
    version: int = 1  # version of the log format


class Round(Struct, frozen=True, tag="round"):
    """A line of a session's log file: messages that were appended together."""

    messages: tuple[Message, ...]


class Title(Struct, frozen=True, tag="title"):
    """A line of a session's log file: the session's new title."""

    title: str


class SavedChoices(Struct, frozen=True, tag="chosen"):
    """A line of a session's log file: model, mode, thought level and temperature."""

    model: str
    mode: str
    thought_level: str = "default"
    temperature: float | None = None


class SavedUsage(Struct, frozen=True, tag="spent"):
    """A line of a session's log file: the token usage after a model response."""

    used: int  # tokens of the last request and its response
    size: int | None = None  # context size in tokens, or None if unknown
    cost: float | None = None  # total cost of the session so far in US dollars, or None if unknown


Entry = Head | Round | Title | SavedChoices | SavedUsage
_decode = msgspec.json.Decoder(Entry).decode


@dataclass(slots=True)
class SavedSession:
    """The saved state of a session, as read from its log file."""

    head: Head  # first line of the log file
    messages: list[Message] = field(default_factory=list)  # the conversation history, oldest first
    title: str | None = None  # newest title, or None if no title was saved
    choices: SavedChoices | None = None  # newest choices of the user, or None if none were saved
    usage: SavedUsage | None = None  # token usage after the newest response, or None if none was saved
    unreadable_lines: int = 0  # number of invalid lines, including an incomplete last line after a crash


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """A saved session in a list; `updated_s` is in seconds since 1970."""

    head: Head
    title: str | None
    updated_s: float

    @property
    def updated_at(self) -> str:
        """The time of the last change as ISO 8601 text in UTC."""
        return datetime.fromtimestamp(self.updated_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class SessionLog:
    """The log file of one session. Appended entries are on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        """Return whether the log file exists."""
        return self._path.exists()

    def append(self, entries: Sequence[Entry]) -> None:
        """Append lines to the log file in one write, and wait until they are on disk.

        Raises:
            StoreError: the file is missing, or the write failed.
        """
        self._write(entries, os.O_RDWR | os.O_APPEND)

    def create(self, head: Head) -> None:
        """Create the log file of a new session, with `head` as its first line.

        Raises:
            StoreError: the file cannot be created.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            folder = self._path.parent
            raise StoreError(
                f"sessions cannot be saved in {folder}: {error.strerror}; make this folder writable, "
                "or set XDG_DATA_HOME"
            ) from None
        self._write((head,), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self) -> SavedSession:
        """Read the whole log file and return the session's saved state.

        Invalid lines are skipped.

        Raises:
            OSError: the file cannot be read. FileNotFoundError: the session does not exist.
            StoreError: the file is not a session log.
        """
        saved: SavedSession | None = None
        unreadable_lines = 0
        for line in self._lines():
            try:
                entry = _decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                unreadable_lines += 1
                continue
            match entry:
                case Head():
                    saved = saved or SavedSession(entry)
                case _ if saved is None:
                    unreadable_lines += 1
                case Round(messages):
                    saved.messages.extend(messages)
                case Title(title):
                    saved.title = title
                case SavedChoices():
                    saved.choices = entry
                case SavedUsage():
                    saved.usage = entry
        if saved is None:
            raise StoreError(f"{self._path} is not a session log that this version can read; start a new session")
        saved.unreadable_lines = unreadable_lines
        return saved

    def list_entry(self) -> SessionEntry | None:
        """Return the session's list entry, or None if the log file cannot be read."""
        try:
            # Only the first line and the last title are parsed, because logs can be long.
            with self._path.open("rb") as file:
                head = _decode(file.readline(_MAX_HEAD_BYTES))
                updated_s = os.fstat(file.fileno()).st_mtime
                # `ACCESS_COPY` makes a private mapping. Some network drives permit no other mappings.
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
                    title = _last_title(content)
        except (OSError, ValueError):  # msgspec errors are ValueErrors
            return None
        return SessionEntry(head, title, updated_s) if isinstance(head, Head) else None

    def _lines(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            yield from file

    def _write(self, entries: Iterable[Entry], flags: int) -> None:
        data = b"".join(map(encode, entries))
        try:
            file = os.open(self._path, flags, 0o600)
            try:
                with suppress(OSError):  # some file systems do not support locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                size = os.lseek(file, 0, os.SEEK_END)
                if size and os.pread(file, 1, size - 1) != b"\n":
                    data = b"\n" + data  # end the incomplete line that a crashed process left
                view = memoryview(data)
                while view:
                    view = view[os.write(file, view) :]
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise StoreError(
                f"the session cannot be saved to {self._path}: {error.strerror}; check permissions and disk space"
            ) from None


class Store:
    """All saved sessions of this user, in one folder.

    Methods with a parameter `id` raise StoreError if the id does not match `SESSION_ID`.
    """

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "sessions"

    def create(self, id: str, cwd: str, directories: Sequence[str]) -> SessionLog:
        """Create the log file of a new session and return it.

        `cwd` and `directories` are absolute paths.

        Raises:
            StoreError: the log file cannot be written.
        """
        session_log = SessionLog(self._path(id))
        session_log.create(Head(id, cwd, time.time(), tuple(directories)))
        return session_log

    def open(self, id: str) -> SessionLog:
        """Return the log file of a session. The file need not exist."""
        return SessionLog(self._path(id))

    def delete(self, id: str) -> None:
        """Delete the log file of a session, if it exists.

        Raises:
            StoreError: the session cannot be deleted.
        """
        try:
            self._path(id).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"the session {id} cannot be deleted: {error.strerror}; check the permissions of {self._folder}"
            ) from None

    def page(self, cwd: str | None, cursor: str | None) -> tuple[list[SessionEntry], str | None]:
        """Return a page of saved sessions, newest change first, and the next cursor.

        Args:
            cwd: list only sessions with this working directory, or all sessions if None.
            cursor: cursor from the previous page, or None for the first page.

        Returns:
            The sessions, and the cursor of the next page or None if this page is the last.

        Raises:
            ValueError: the cursor is invalid.
        """
        page_start = _read_cursor(cursor) if cursor else None
        page: list[SessionEntry] = []
        last = (0, "")
        for key in sorted(self._session_keys(), reverse=True):
            if page_start is not None and key >= page_start:
                continue
            entry = SessionLog(self._path(key[1])).list_entry()
            if entry is None or (cwd is not None and entry.head.cwd != cwd):
                continue
            if len(page) == PAGE_SIZE:
                return page, _cursor(last)
            page.append(entry)
            last = key
        return page, None

    def _session_keys(self) -> Iterator[tuple[int, str]]:
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    id, _, kind = entry.name.rpartition(".")
                    if kind == "jsonl" and SESSION_ID.fullmatch(id):
                        yield entry.stat().st_mtime_ns, id
        except FileNotFoundError:
            return

    def _path(self, id: str) -> Path:
        if not SESSION_ID.fullmatch(id):
            raise StoreError(f"{id[:100]!r} is not a session id; session/list lists the saved sessions")
        return self._folder / f"{id}.jsonl"


def _last_title(content: mmap.mmap) -> str | None:
    start = content.rfind(_TITLE_MARK)
    while start >= 0:
        end = content.find(b"\n", start + 1)
        try:
            entry = _decode(content[start + 1 : end if end >= 0 else len(content)])
        except msgspec.MsgspecError:
            entry = None  # an incomplete line, or a message whose text looks like a title entry
        if isinstance(entry, Title):
            return entry.title
        start = content.rfind(_TITLE_MARK, 0, start)
    return None


def _cursor(key: tuple[int, str]) -> str:
    return base64.urlsafe_b64encode(f"{key[0]}:{key[1]}".encode()).decode()


def _read_cursor(cursor: str) -> tuple[int, str]:
    try:
        mtime, _, id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(":")
        return int(mtime), id
    except (binascii.Error, UnicodeError, ValueError):
        raise ValueError(
            f"{cursor[:100]!r} is not a cursor of a session list; omit the cursor for the first page"
        ) from None
