"""The folders that a session's tools may access, compared after resolving symbolic links and `..`."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from helexa.acp.failure import ToolError


class OutOfBounds(ToolError):
    """The path is outside the session's folders."""


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A path within the session's folders. The file or folder need not exist.

    Attributes:
        real: path with all links resolved, for local file access.
        path: `real` with the session's folder spelled as the client spells it, for requests to the client and for
            display.
        plans: whether the path is in the agent's plan folder, which the client cannot access.
        guarded: whether the path is in `.git`, where a written file can lead to code execution.
    """

    real: Path
    path: Path
    plans: bool = False
    guarded: bool = False

    def is_folder(self) -> bool:
        """Return whether a readable folder exists at the path."""
        try:
            return self.real.is_dir()
        except OSError:
            return False

    def exists(self) -> bool:
        """Return whether a file or folder exists at the path."""
        try:
            return self.real.exists()
        except OSError:
            return False


class Boundary:
    """The folders of one session: working directory, additional folders, and folder of plans."""

    def __init__(self, cwd: Path, additional: Iterable[Path] = (), plans: Path | None = None) -> None:
        self.cwd = cwd
        self._folders = [(Path(os.path.realpath(folder)), folder) for folder in dict.fromkeys((cwd, *additional))]
        self._plans = plans
        self._real_plans = Path(os.path.realpath(plans)) if plans else None

    @property
    def folders(self) -> list[Path]:
        """The session's folders as the client spells them, the working directory first."""
        return [folder for _, folder in self._folders]

    def resolve(self, text: str) -> ResolvedPath:
        """Resolve a path from the model.

        The path is absolute, below the home folder (`~`, `$HOME`), or below the working directory.

        Raises:
            OutOfBounds: the text is not a path, or the path is outside the folders.
        """
        for home in ("~", "$HOME", "${HOME}"):
            if text == home or text.startswith(f"{home}/"):
                text = str(Path.home()) + text[len(home) :]
        try:
            os.fsencode(text)
            real = Path(os.path.realpath(self.cwd / text))
        except (ValueError, OSError) as error:  # NUL, lone surrogate, or loop of links
            raise OutOfBounds(f"{text!r} is not a path") from error
        if self._real_plans is not None and self._plans is not None and real.is_relative_to(self._real_plans):
            return ResolvedPath(real, self._plans / real.relative_to(self._real_plans), plans=True)
        for root, folder in self._folders:
            if real.is_relative_to(root):
                below = real.relative_to(root)
                return ResolvedPath(real, folder / below, guarded=any(name.lower() == ".git" for name in below.parts))
        allowed = ", ".join(str(folder) for folder in self.folders)
        raise OutOfBounds(f"{text} is outside of this session's folders ({allowed})")

    def brief(self, path: Path) -> str:
        """Return a path for display, relative to the working directory if possible."""
        return str(path.relative_to(self.cwd)) if path.is_relative_to(self.cwd) else str(path)
