"""How far a session's tools may go: its folders, compared after links are followed and `..` is undone."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from helexa.acp.failure import ToolError


class OutOfBounds(ToolError):
    """A path that no tool may touch."""


@dataclass(frozen=True, slots=True)
class Place:
    """A path within the boundary, whether or not anything is there.

    Attributes:
        real: no link is left in it: what is opened here.
        path: the same place below the folder as the client spells it: what the client is asked for and shown.
        plans: whether it is in the folder of plans, which is ours and which the client does not know.
        guarded: whether to write there is to run code later, whatever else is allowed.
    """

    real: Path
    path: Path
    plans: bool = False
    guarded: bool = False

    def is_folder(self) -> bool:
        """Whether a folder is there, as far as can be seen."""
        try:
            return self.real.is_dir()
        except OSError:
            return False

    def exists(self) -> bool:
        """Whether anything is there, as far as can be seen."""
        try:
            return self.real.exists()
        except OSError:
            return False


class Boundary:
    """The folders of one session: its working directory, its additional ones, and the one for its plans."""

    def __init__(self, cwd: Path, additional: Iterable[Path] = (), plans: Path | None = None) -> None:
        self.cwd = cwd
        self._folders = [(Path(os.path.realpath(folder)), folder) for folder in dict.fromkeys((cwd, *additional))]
        self._plans = plans
        self._real_plans = Path(os.path.realpath(plans)) if plans else None

    @property
    def folders(self) -> list[Path]:
        """The client's folders, as it spells them, the working directory first."""
        return [folder for _, folder in self._folders]

    def place(self, text: str) -> Place:
        """Where a path of the model's leads: absolute, below the home (`~`, `$HOME`) or the working directory.

        Raises:
            OutOfBounds: it is no path, or it leads out of the folders.
        """
        for home in ("~", "$HOME", "${HOME}"):
            if text == home or text.startswith(f"{home}/"):
                text = str(Path.home()) + text[len(home) :]
        try:
            os.fsencode(text)
            real = Path(os.path.realpath(self.cwd / text))
        except (ValueError, OSError) as error:  # a NUL, half a character, a loop of links
            raise OutOfBounds(f"{text!r} is not a path") from error
        if self._real_plans is not None and self._plans is not None and real.is_relative_to(self._real_plans):
            return Place(real, self._plans / real.relative_to(self._real_plans), plans=True)
        for root, folder in self._folders:
            if real.is_relative_to(root):
                below = real.relative_to(root)
                return Place(real, folder / below, guarded=any(part.lower() == ".git" for part in below.parts))
        allowed = ", ".join(str(folder) for folder in self.folders)
        raise OutOfBounds(f"{text} is outside of this session's folders ({allowed})")

    def brief(self, path: Path) -> str:
        """A path for people: relative to the working directory where it is below it."""
        return str(path.relative_to(self.cwd)) if path.is_relative_to(self.cwd) else str(path)
