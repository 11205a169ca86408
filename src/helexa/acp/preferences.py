"""Saved preferences of a project: the last choices of the user and permanent permissions."""

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
    """A saved "always" answer of the user: calls of a tool that are permanently allowed or rejected.

    `tool` and `subject` name these calls, as in `helexa.acp.tools.tool.Scope`.
    """

    tool: str
    subject: str
    allowed: bool


class Project(Struct, frozen=True):
    """The preferences of a folder. A field is None until the user chooses a value."""

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
        """Return the preferences file of a folder."""
        return self._folder / f"{hashlib.sha256(os.fsencode(cwd)).hexdigest()[:16]}.json"

    def read(self, cwd: str) -> Project:
        """Return the preferences of a folder."""
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
        """Read, change and write preferences under a file lock; return the new preferences."""
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
        """Save a permanent permission or rejection. If there are more than `MAX_GRANTS`, remove the oldest."""

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
