"""Finds the same model on another host: its path there, a digest of its weights."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import UNREADABLE_FILE, ModelFileError
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.processes import heartbeat
from helexa.neuron.weights.gguf.files import part_names
from helexa.neuron.weights.model_file import open_model_file

_PIECE_BYTES = 16 << 20
_CONFIG = "config.json"
_SUFFIXES = (".safetensors", ".gguf")


@dataclass(frozen=True)
class ModelPath:
    """The path of a model's file or folder on host 0."""

    absolute: str  # the absolute path on host 0
    in_cache: str | None  # the path relative to helexa's cache folder; None if the model is elsewhere
    in_home: str | None  # the path relative to the user's home folder; None if the model is elsewhere

    @classmethod
    def of(cls, model: Path) -> "ModelPath":
        """Return the path of a model on host 0, which is this host."""
        model = model.absolute()
        return cls(str(model), _relative(model, cache_root(None)), _relative(model, _home()))

    def find(self) -> Path:
        """Return the path of the model on this host.

        Raises:
            ModelFileError: this host does not have the model.
        """
        # Tried in this order: below the cache folder, below the home folder, the same absolute path. The home folders
        # of two hosts may differ.
        candidates = [Path(self.absolute)]
        if self.in_home is not None and (home := _home()) is not None:
            candidates.insert(0, home / self.in_home)
        if self.in_cache is not None:
            candidates.insert(0, cache_root(None) / self.in_cache)
        for candidate in candidates:
            if candidate.exists():
                return candidate
        raise ModelFileError(f"no such file or folder: {self.absolute}", advice="copy the model to this host")


def _relative(path: Path, folder: Path | None) -> str | None:
    is_inside = folder is not None and path.is_relative_to(folder.absolute())
    return str(path.relative_to(folder.absolute())) if folder is not None and is_inside else None


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None


def model_digest(model: Path) -> str:
    """Return the SHA-256 digest of the names and contents of a model's files.

    The files are the weights and, in a folder, `config.json`. The first call reads all of them, which takes minutes,
    and stores the digest.

    Args:
        model: a GGUF file, the first file of a split GGUF model, or a folder.

    Raises:
        ModelFileError: a file cannot be read.
    """
    files = _files(model)
    try:
        states = [(path, path.stat()) for path in files]
        # Reading all weights takes minutes, so the digest is stored until a file's size or time changes.
        key = "\0".join(f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}" for path, state in states)
        stored = cache_root(None) / "digests" / hashlib.sha256(key.encode()).hexdigest()
        with suppress(OSError):
            return stored.read_text()
        digest = _digest(files)
    except OSError as error:
        raise ModelFileError(
            f"{model.name}: cannot be read: {error.strerror or error}", advice=UNREADABLE_FILE
        ) from None
    with suppress(OSError):  # if the cache cannot be written, the next load reads the files again
        stored.parent.mkdir(parents=True, exist_ok=True)
        # Another process must not read a digest that is only partly written.
        temporary = stored.with_name(f"{stored.name}.{os.getpid()}")
        temporary.write_text(digest)
        temporary.replace(stored)
    return digest


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with open_model_file(path, buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                heartbeat.beat()
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    if model.is_dir():
        return sorted(path for path in model.iterdir() if path.suffix in _SUFFIXES or path.name == _CONFIG)
    return [model.with_name(name) for name in part_names(model.name)]
