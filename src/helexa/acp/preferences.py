"""Saved preferences of each project: last choices and permanent permissions."""

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

logger = logging.getLogger(__name__)
MAX_GRANTS = 500


class Grant(Struct, frozen=True):
    """A saved decision that permanently allows or rejects calls of a tool."""

    tool: str
    subject: str  # the calls to which the decision applies; see `helexa.acp.tools.permission_rules.Scope`
    allowed: bool  # True if the calls are allowed, False if they are rejected
    label: str = ""  # description for the user. Empty if an earlier version of the agent saved the decision.


class Project(Struct, frozen=True):
    """The saved preferences for sessions in the folder `cwd`.

    A preference is None until the user has chosen a value.
    """

    cwd: str
    model: str | None = None
    mode: str | None = None
    thought_level: str | None = None
    temperature: float | None = None
    grants: tuple[Grant, ...] = ()


class Preferences:
    """The preferences of all projects, one file per project.

    File errors are logged and not raised.
    """

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "projects"

    def path(self, cwd: str) -> Path:
        """Return the path of the file that stores the preferences for the folder `cwd`."""
        return self._folder / f"{hashlib.sha256(os.fsencode(cwd)).hexdigest()[:16]}.json"

    def read(self, cwd: str) -> Project:
        """Return the saved preferences for the folder `cwd`.

        If none are saved or the file cannot be read, return empty preferences.
        """
        path = self.path(cwd)
        try:
            project = msgspec.json.decode(path.read_bytes(), type=Project)
        except FileNotFoundError:
            return Project(cwd)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.warning("preferences not read path=%r error=%r; the defaults apply", str(path), str(error))
            return Project(cwd)
        return project if project.cwd == cwd else Project(cwd)

    def change(self, cwd: str, change: Callable[[Project], Project]) -> Project:
        """Pass `cwd`'s preferences to `change`; return its result, saved if possible."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The file lock excludes concurrent changes by other processes.
            with self._locked():
                project = change(self.read(cwd))
                _replace(self.path(cwd), msgspec.json.format(msgspec.json.encode(project)))
                return project
        except OSError as error:
            logger.warning(
                "preferences not saved path=%r error=%r; new sessions use the former preferences",
                str(self.path(cwd)),
                str(error),
            )
            return change(self.read(cwd))

    def grant(self, cwd: str, grant: Grant) -> Project:
        """Save the user's decision about certain tool calls in the project `cwd`.

        Return the new preferences.

        An earlier decision about the same calls is replaced. At most `MAX_GRANTS` decisions are saved. If there are
        more, the oldest is removed.
        """

        def added(project: Project) -> Project:
            grants = (*_without(project.grants, grant), grant)[-MAX_GRANTS:]
            return msgspec.structs.replace(project, grants=grants)

        return self.change(cwd, added)

    def revoke(self, cwd: str, grant: Grant) -> Project:
        """Delete the user's decision about the calls of `grant`; return the preferences."""

        def removed(project: Project) -> Project:
            return msgspec.structs.replace(project, grants=_without(project.grants, grant))

        return self.change(cwd, removed)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(OSError):  # some file systems do not support locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _without(grants: tuple[Grant, ...], removed: Grant) -> tuple[Grant, ...]:
    return tuple(grant for grant in grants if (grant.tool, grant.subject) != (removed.tool, removed.subject))


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
