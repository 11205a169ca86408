"""The path of a model, which other hosts can find in their own folders."""

from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import ModelFileError
from helexa.neuron.cache_folder import cache_root


@dataclass(frozen=True)
class ModelPath:
    """The path of a model's file or folder on host 0.

    Attributes:
        absolute: the absolute path on host 0.
        in_cache: the path relative to helexa's cache folder; None if the model is elsewhere.
        in_home: the path relative to the user's home folder; None if the model is elsewhere.
    """

    absolute: str
    in_cache: str | None
    in_home: str | None

    @classmethod
    def of(cls, model: Path) -> "ModelPath":
        """Return the path of a model on this host, which is host 0."""
        model = model.absolute()
        return cls(str(model), _relative(model, cache_root(None)), _relative(model, _home()))

    def find(self) -> Path:
        """Return the path of the model on this host: the same path in the cache folder, the home folder, or the root.

        Raises:
            ModelFileError: this host does not have the model.
        """
        candidates = [Path(self.absolute)]
        if self.in_home is not None and (home := _home()) is not None:
            candidates.insert(0, home / self.in_home)
        if self.in_cache is not None:
            candidates.insert(0, cache_root(None) / self.in_cache)
        for candidate in candidates:
            if candidate.exists():
                return candidate
        raise ModelFileError(f"no such file or folder: {self.absolute}; copy the model to this host")


def _relative(path: Path, folder: Path | None) -> str | None:
    is_inside = folder is not None and path.is_relative_to(folder.absolute())
    return str(path.relative_to(folder.absolute())) if folder is not None and is_inside else None


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None
