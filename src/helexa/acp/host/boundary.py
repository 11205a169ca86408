"""The folders that a session's tools may access. Paths are checked after symbolic links and `..` are resolved."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from helexa.acp.failure import ToolError
from helexa.acp.host.guarded_paths import is_guarded


class OutOfBounds(ToolError):
    """A path is invalid, or is outside the folders that the session may access."""


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A path within the folders that the session may access. The file or folder need not exist.

    Attributes:
        real: path with all symbolic links resolved, for local file access.
        path: the same path for requests to the editor and for display. Symbolic links in the session's folder are not
            resolved, so the path begins as the editor wrote the folder.
        plans: whether the path is in the folder of the agent's plans, which the editor cannot access.
        guarded: whether a file at the path may run code later, for example in `.git` (see `guarded_paths`).
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
    """The folders that one session may access: working directory, additional folders, and folder of plans."""

    def __init__(self, cwd: Path, additional: Iterable[Path] = (), plans: Path | None = None) -> None:
        self.cwd = cwd
        self._folders = [(Path(os.path.realpath(folder)), folder) for folder in dict.fromkeys((cwd, *additional))]
        self._plans = plans
        self._real_plans = Path(os.path.realpath(plans)) if plans else None

    @property
    def folders(self) -> list[Path]:
        """The working directory and the additional folders, as the editor wrote them."""
        return [folder for _, folder in self._folders]

    def resolve(self, text: str) -> ResolvedPath:
        """Resolve a path that the model wrote, and check that the session may access it.

        Args:
            text: an absolute path, a path that begins with `~` or `$HOME`, or a path relative to the working directory.

        Raises:
            OutOfBounds: `text` is not a path, or the path is outside the session's folders.
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
                return ResolvedPath(real, folder / below, guarded=is_guarded(below))
        allowed = ", ".join(str(folder) for folder in self.folders)
        raise OutOfBounds(f"{text} is outside of this session's folders ({allowed})")

    def brief(self, path: Path) -> str:
        """Return a path as text for display. A path in the working directory is shown relative to it."""
        return str(path.relative_to(self.cwd)) if path.is_relative_to(self.cwd) else str(path)
