"""Saved preferences of each project: the user's last choices and the permanent permissions of tool calls."""

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

logger = logging.getLogger(__name__)
MAX_GRANTS = 500


class Grant(Struct, frozen=True):
    """A saved decision of the user that permanently allows or rejects certain calls of a tool.

    Attributes:
        tool: name of the tool.
        subject: the calls to which the decision applies; see `helexa.acp.tools.tool.Scope`.
        allowed: True if the calls are allowed, False if they are rejected.
    """

    tool: str
    subject: str
    allowed: bool


class Project(Struct, frozen=True):
    """The saved preferences for sessions in the folder `cwd`. A field is None until the user chooses a value."""

    cwd: str
    model: str | None = None
    mode: str | None = None
    thought_level: str | None = None
    temperature: float | None = None
    grants: tuple[Grant, ...] = ()


class Preferences:
    """The preferences of all projects, one file per project. Read and write errors are logged, not raised."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "projects"

    def path(self, cwd: str) -> Path:
        """Return the path of the file that stores the preferences for the folder `cwd`."""
        return self._folder / f"{hashlib.sha256(os.fsencode(cwd)).hexdigest()[:16]}.json"

    def read(self, cwd: str) -> Project:
        """Return the preferences for the folder `cwd`, or empty preferences if none are saved."""
        path = self.path(cwd)
        try:
            project = msgspec.json.decode(path.read_bytes(), type=Project)
        except FileNotFoundError:
            return Project(cwd)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.warning("preferences cannot be read, using defaults: path=%s error=%s", path, error)
            return Project(cwd)
        return project if project.cwd == cwd else Project(cwd)

    def change(self, cwd: str, change: Callable[[Project], Project]) -> Project:
        """Replace the saved preferences for the folder `cwd` by the result of `change`, and return this result.

        A file lock excludes concurrent changes by other processes.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                project = change(self.read(cwd))
                _replace(self.path(cwd), msgspec.json.format(msgspec.json.encode(project)))
                return project
        except OSError as error:
            logger.warning("preferences cannot be saved: error=%s", error)
            return change(self.read(cwd))

    def grant(self, cwd: str, tool: str, subject: str, allowed: bool) -> Project:
        """Save the user's decision to permanently allow or reject certain tool calls. Return the new preferences.

        At most `MAX_GRANTS` decisions are saved. If there are more, the oldest is removed.

        Args:
            cwd: working directory of the project.
            tool: name of the tool.
            subject: the calls to which the decision applies; see `Grant`.
            allowed: True if the calls are allowed, False if they are rejected.
        """

        def added(project: Project) -> Project:
            other_grants = tuple(grant for grant in project.grants if (grant.tool, grant.subject) != (tool, subject))
            grants = (*other_grants, Grant(tool, subject, allowed))[-MAX_GRANTS:]
            return msgspec.structs.replace(project, grants=grants)

        return self.change(cwd, added)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
