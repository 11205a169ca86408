"""What is remembered of a project: the last choices of its user, and what he allowed for good."""

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
MOST_GRANTS = 500


class Grant(Struct, frozen=True):
    """A scope that was allowed or rejected for good; see `helexa.acp.tools.tool.Scope`."""

    tool: str
    subject: str
    allowed: bool


class Project(Struct, frozen=True):
    """What is remembered of a folder; None where nothing was chosen yet."""

    cwd: str
    model: str | None = None
    mode: str | None = None
    thought_level: str | None = None
    temperature: float | None = None
    grants: tuple[Grant, ...] = ()


class Preferences:
    """The memory of all projects. It is a convenience: what cannot be read or written is logged, and forgotten."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "projects"

    def path(self, cwd: str) -> Path:
        """The file that remembers a folder."""
        return self._folder / f"{hashlib.sha256(os.fsencode(cwd)).hexdigest()[:16]}.json"

    def read(self, cwd: str) -> Project:
        """What is remembered of a folder."""
        path = self.path(cwd)
        try:
            project = msgspec.json.decode(path.read_bytes(), type=Project)
        except FileNotFoundError:
            return Project(cwd)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read, nothing is remembered: %s", path, error)
            return Project(cwd)
        return project if project.cwd == cwd else Project(cwd)

    def change(self, cwd: str, change: Callable[[Project], Project]) -> Project:
        """Read, change and write in one step, whoever else does the same; what is remembered now."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                project = change(self.read(cwd))
                _replace(self.path(cwd), msgspec.json.format(msgspec.json.encode(project)))
                return project
        except OSError as error:
            logger.warning("what was chosen cannot be remembered: %s", error)
            return change(self.read(cwd))

    def grant(self, cwd: str, tool: str, subject: str, allowed: bool) -> Project:
        """Remember an "always"; the oldest ones give way."""

        def added(project: Project) -> Project:
            others = tuple(grant for grant in project.grants if (grant.tool, grant.subject) != (tool, subject))
            kept = (*others, Grant(tool, subject, allowed))[-MOST_GRANTS:]
            return msgspec.structs.replace(project, grants=kept)

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
