"""The cached files of a repository, in the layout of the Hub's own tools.

models--org--name/blobs/KEY                     content of a file, named by its checksum
                  blobs/KEY.helexa.incomplete   partially downloaded content
                  snapshots/COMMIT/FILE         links to blobs
                  refs/main                     the commit that was downloaded last
                  .helexa/COMMIT.json           names of all files of the repository at the commit
"""

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import ModelFileError, SourceError
from helexa.neuron.sources.repository_files import SHARD_INDEX, Listing, RemoteFile, chosen_files, model_path
from helexa.neuron.weights.model_file import MAX_JSON_BYTES, read_json

PARTIAL = ".helexa.incomplete"  # suffix of the names of partially downloaded files

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors", re.ASCII)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class CachedModel:
    """Result of a search for a model in the cached snapshots."""

    path: Path | None = None  # GGUF file or checkpoint folder. None if the cache does not have the complete model.
    # Description of the missing files. Empty if the cache has the complete model or none of its files.
    missing: str = ""


class Snapshots:
    """The cached files of one repository, for all cached commits."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder  # cache folder, which contains all cached repositories
        self._repository = folder / f"models--{name.replace('/', '--')}"
        self._ref = self._repository / "refs" / "main"

    def at(self, commit: str) -> Path:
        """Return the path of the folder for the files of `commit`."""
        return self._repository / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        """Return the path at which the complete content of `file` is stored."""
        return self._repository / "blobs" / file.key

    def partial(self, file: RemoteFile) -> Path:
        """Return the path at which the partially downloaded content of `file` is stored."""
        return self.blob(file).with_name(f"{file.key}{PARTIAL}")

    def has_blob(self, file: RemoteFile) -> bool:
        """Return whether the complete content of `file` is stored, for any commit."""
        return _is_complete(self.blob(file), file)

    def has(self, commit: str, file: RemoteFile) -> bool:
        """Return whether the folder of `commit` contains the complete `file`."""
        return _is_complete(self.at(commit) / file.name, file)

    def bytes_to_fetch(self, files: Iterable[RemoteFile]) -> int:
        """Return the number of bytes that must be downloaded for `files`.

        Bytes of partial downloads are subtracted. A file of unknown size counts as 0 bytes.
        """
        return sum(max(0, (file.size or 0) - _size(self.partial(file))) for file in files if not self.has_blob(file))

    def free_bytes(self) -> int:
        """Create the folder `blobs`; return the free bytes of its disk."""
        blobs = self._repository / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(blobs).free

    def record_listing(self, listing: Listing) -> None:
        """Store the file names of a commit, so that `cached` can detect missing files.

        Raises:
            OSError: the cache cannot be written.
        """
        _write(self._listing_path(listing.commit), json.dumps(list(listing.files)))

    def link(self, commit: str, file: RemoteFile) -> None:
        """Create a link in the folder of `commit` to the complete content of `file`.

        If the file system does not support links, the content is moved to the folder.
        """
        target = self.at(commit) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        link = temporary_path(target)
        try:
            link.symlink_to(os.path.relpath(self.blob(file), target.parent))
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            link = self.blob(file)  # some shared file systems have no links
        link.replace(target)

    def pin(self, commit: str) -> None:
        """Record `commit` as the commit to use if the hub is unavailable."""
        if self._commit() != commit:
            _write(self._ref, commit)

    def cached(self, source: str, quant: str | None) -> CachedModel:
        """Return the cached model, or which files are missing, without network access."""
        # The commit that was downloaded last takes precedence. An older commit is used if it has the complete model and
        # the last commit does not.
        models = [self._cached_at(commit, source, quant) for commit in self._commits()]
        return next((cached for cached in models if cached.path), models[0] if models else CachedModel())

    def _cached_at(self, commit: str, source: str, quant: str | None) -> CachedModel:
        snapshot = self.at(commit)
        present = sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
        if not present:
            return CachedModel()
        recorded = self._recorded_names(commit)
        try:
            files = chosen_files(source, recorded or present, quant)
            required = {*files, *(() if recorded else _implied(snapshot, files))}
        except SourceError as error:
            if recorded or SHARD_INDEX not in present:
                return CachedModel(missing=f"the files in {self.folder} are not usable: {error}")
            files, required = [], _shards(snapshot)
        missing = sorted(required.difference(present))
        if missing or not files:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            return CachedModel(missing=f"{self.folder} lacks {', '.join(missing[:4]) or 'the weights'}{more}")
        return CachedModel(model_path(snapshot, files))

    def _commits(self) -> list[str]:
        """Return all cached commits. The first is the commit that was downloaded last."""
        try:
            folders = sorted(self.at("").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            return []
        last = self._commit()
        commits = [folder.name for folder in folders if _COMMIT.fullmatch(folder.name)]
        return sorted(commits, key=lambda commit: commit != last)

    def _listing_path(self, commit: str) -> Path:
        return self._repository / ".helexa" / f"{commit}.json"

    def _recorded_names(self, commit: str) -> list[str]:
        """Return the file names that `record_listing` stored for `commit`."""
        try:
            names = json.loads(self._listing_path(commit).read_text())
        except (OSError, ValueError):
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def _commit(self) -> str:
        try:
            return self._ref.read_text().strip()
        except (OSError, ValueError):
            return ""


def _implied(snapshot: Path, files: Sequence[str]) -> set[str]:
    """Return the names of further files that a checkpoint with `files` must have.

    The names are inferred from the shard index, and from shard names such as `model-00001-of-00003.safetensors`.
    """
    if "config.json" not in files:
        return set()
    shards = _shards(snapshot) if SHARD_INDEX in files else set[str]()
    for match in filter(None, map(_SHARD.fullmatch, files)):
        stem, count = match.groups()
        shards |= {f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)}
    return {"tokenizer.json", *shards}


def _shards(snapshot: Path) -> set[str]:
    """Return the names of the safetensors files in the shard index.

    If the index cannot be read, return a text that describes the index instead of names. The caller lists this text
    among the missing files.
    """
    try:
        names = set(read_json(snapshot / SHARD_INDEX, MAX_JSON_BYTES)["weight_map"].values())
        return {name for name in names if isinstance(name, str)}
    except (ModelFileError, KeyError, TypeError, AttributeError):
        return {f"a readable {SHARD_INDEX}"}


def _is_complete(path: Path, file: RemoteFile) -> bool:
    try:
        return path.is_file() and file.size in (None, path.stat().st_size)
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_path(path)
    partial.write_text(text)
    partial.replace(path)


def temporary_path(path: Path) -> Path:
    """Return this thread's temporary path for a new version of a snapshot's file."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
