"""Digest of a model's files, with which hosts verify that they have the same files."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from helexa.core.errors import ModelFileError
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.processes import heartbeat
from helexa.neuron.weights.gguf.files import part_names

_PIECE_BYTES = 16 << 20
_CONFIG = "config.json"
_SUFFIXES = (".safetensors", ".gguf")


def model_digest(model: Path) -> str:
    """Return the SHA-256 digest of the names and contents of the files from which a model's weights are loaded.

    The digest is stored in the cache folder together with the sizes and modification times of the files, so that the
    files are read again only after a change.

    Args:
        model: a GGUF file, the first file of a split GGUF model, or a folder.

    Raises:
        ModelFileError: a file cannot be read.
    """
    files = _files(model)
    try:
        states = [(path, path.stat()) for path in files]
        key = "\0".join(f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}" for path, state in states)
        stored = cache_root(None) / "digests" / hashlib.sha256(key.encode()).hexdigest()
        with suppress(OSError):
            return stored.read_text()
        digest = _digest(files)
    except OSError as error:
        raise ModelFileError(f"{model.name}: cannot be read: {error.strerror or error}") from None
    with suppress(OSError):  # if the cache cannot be written, the next load reads the files again
        stored.parent.mkdir(parents=True, exist_ok=True)
        temporary = stored.with_name(f"{stored.name}.{os.getpid()}")
        temporary.write_text(digest)
        temporary.replace(stored)
    return digest


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                heartbeat.beat()
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    if model.is_dir():
        return sorted(path for path in model.iterdir() if path.suffix in _SUFFIXES or path.name == _CONFIG)
    return [model.with_name(name) for name in part_names(model.name)]
