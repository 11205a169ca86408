"""A repository in the cache, in the layout that every tool of the Hugging Face Hub shares.

models--org--name/blobs/KEY                 content, by its checksum
                  blobs/KEY.helexa.incomplete   content that is on its way
                  snapshots/COMMIT/FILE     links to blobs
                  refs/main                 the commit that was fetched last
                  .helexa/COMMIT.json       the names of all files that the repository has at that commit
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

from helexa.core.errors import SourceError
from helexa.neuron.sources.choice import SHARD_INDEX, chosen_files, model_path
from helexa.neuron.sources.listing import Listing, RemoteFile

PARTIAL = ".helexa.incomplete"
"""How the names of files end that are on their way."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors", re.ASCII)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Kept:
    """What the cache has of a model: its path; or what it lacks, in words, if there is something of it."""

    path: Path | None = None
    lack: str = ""


class Snapshots:
    """The cached files of one repository.

    Attributes:
        folder: the cache folder of all repositories.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._repository = folder / f"models--{name.replace('/', '--')}"
        self._ref = self._repository / "refs" / "main"

    def at(self, commit: str) -> Path:
        """The folder of the files at `commit`."""
        return self._repository / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        """Where the content of `file` is, once it is complete."""
        return self._repository / "blobs" / file.key

    def partial(self, file: RemoteFile) -> Path:
        """Where the content of `file` grows."""
        return self.blob(file).with_name(f"{file.key}{PARTIAL}")

    def has_blob(self, file: RemoteFile) -> bool:
        """Whether the content of `file` is complete."""
        return _is_whole(self.blob(file), file)

    def has(self, commit: str, file: RemoteFile) -> bool:
        """Whether `file` is there as it is at `commit`."""
        return _is_whole(self.at(commit) / file.name, file)

    def bytes_to_fetch(self, files: Iterable[RemoteFile]) -> int:
        """What is still to come of `files`, in bytes; those of unknown size do not count."""
        return sum(max(0, (file.size or 0) - _size(self.partial(file))) for file in files if not self.has_blob(file))

    def room(self) -> int:
        """Bytes that the file system can still take; from here on there is a folder for blobs.

        Raises:
            OSError: the cache cannot be written.
        """
        blobs = self._repository / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(blobs).free

    def note(self, listing: Listing) -> None:
        """Remember what there is at a commit, before some of it is fetched: a part of it must not pass for the whole.

        Raises:
            OSError: the cache cannot be written.
        """
        _write(self._note(listing.commit), json.dumps(list(listing.files)))

    def link(self, commit: str, file: RemoteFile) -> None:
        """Let the finished content of `file` be part of `commit`.

        Raises:
            OSError: the cache cannot be written.
        """
        target = self.at(commit) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        link = beside(target)
        try:
            link.symlink_to(os.path.relpath(self.blob(file), target.parent))
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            link = self.blob(file)  # disks that are shared with other systems know no links
        link.replace(target)

    def pin(self, commit: str) -> None:
        """Remember `commit` as the one that serves when the hub is away.

        Raises:
            OSError: the cache cannot be written.
        """
        if self._commit() != commit:
            _write(self._ref, commit)

    def kept(self, source: str, quant: str | None) -> Kept:
        """What earlier fetches left of the model that `quant` chooses; asks nobody.

        The commit that was fetched last comes first, but of that there may be only another quantisation.
        """
        found = [self._kept_at(commit, source, quant) for commit in self._commits()]
        return next((kept for kept in found if kept.path), found[0] if found else Kept())

    def _kept_at(self, commit: str, source: str, quant: str | None) -> Kept:
        snapshot = self.at(commit)
        present = sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
        if not present:
            return Kept()
        listed = self._listed(commit)
        try:
            files = chosen_files(source, listed or present, quant)
            wanted = {*files, *(() if listed else _implied(snapshot, files))}
        except SourceError as error:
            if listed or SHARD_INDEX not in present:
                return Kept(lack=f"the part of it that is in {self.folder} will not do: {error}")
            files, wanted = [], _shards(snapshot)
        missing = sorted(wanted.difference(present))
        if missing or not files:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            return Kept(lack=f"{self.folder} lacks {', '.join(missing[:4]) or 'the weights'}{more}")
        return Kept(model_path(snapshot, files))

    def _commits(self) -> list[str]:
        """All that are there, the one fetched last first."""
        try:
            folders = sorted(self.at("").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            return []
        last = self._commit()
        commits = [folder.name for folder in folders if _COMMIT.fullmatch(folder.name)]
        return sorted(commits, key=lambda commit: commit != last)

    def _note(self, commit: str) -> Path:
        return self._repository / ".helexa" / f"{commit}.json"

    def _listed(self, commit: str) -> list[str]:
        """The names that were noted; none where the Hub's own tools have fetched."""
        try:
            names = json.loads(self._note(commit).read_text())
        except (OSError, ValueError):
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def _commit(self) -> str:
        try:
            return self._ref.read_text().strip()
        except (OSError, ValueError):
            return ""


def _implied(snapshot: Path, files: Sequence[str]) -> set[str]:
    """What a checkpoint of `files` needs by all that can be told where nothing was noted."""
    if "config.json" not in files:
        return set()
    shards = _shards(snapshot) if SHARD_INDEX in files else set[str]()
    for match in filter(None, map(_SHARD.fullmatch, files)):
        stem, count = match.groups()
        shards |= {f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)}
    return {"tokenizer.json", *shards}


def _shards(snapshot: Path) -> set[str]:
    """The files that the index names; the index itself if it cannot be read."""
    try:
        named = set(json.loads((snapshot / SHARD_INDEX).read_text())["weight_map"].values())
        return {name for name in named if isinstance(name, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {f"a readable {SHARD_INDEX}"}


def _is_whole(path: Path, file: RemoteFile) -> bool:
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
    partial = beside(path)
    partial.write_text(text)
    partial.replace(path)


def beside(path: Path) -> Path:
    """A name for what will take the place of `path`, used by nobody else."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
