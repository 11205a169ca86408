"""Download a wheel with pip or uv, which know the user's indexes and certificates.

An environment without pip uses uv. Without uv, the node runs the pip that Python bundles for new environments
(`ensurepip`), directly from its wheel.
"""

import errno
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from helexa.core.errors import SourceError
from helexa.neuron.sources.fetch_and_errors import Fetch, disk_error, source_error

_POLL_SECONDS = 0.2
_TAIL_BYTES = 400
_PIP_PROGRESS = re.compile(rb"^Progress (\d+) of (\d+)\s*$", re.MULTILINE)
_PIP_WITH_PROGRESS = (24, 1)
_NO_CONNECTION = re.compile(r"connection broken by|client error \(Connect\)|dns error")
_CONNECTION_ERRORS = re.compile(
    r"Connection refused|Network is unreachable|No route to host|Name or service not known|timed out"
    r"|Temporary failure in name resolution|failed to lookup address information|certificate verify failed"
)
_NO_INSTALLER = "this Python has no pip, and there is no uv; install pip or uv"
_NAME_OF_INDEX = re.compile(r"^[\w.-]+=")  # uv accepts NAME=URL
# Variables with package indexes: pip's, then uv's of the same meaning.
_UV_INDEXES = (
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
)


def has_installer() -> bool:
    """Return whether pip or uv is available to download wheels."""
    return importlib.util.find_spec("pip") is not None or _uv() is not None or _bundled_pip() is not None


def download_wheel(requirement: str, scratch: Path, fetch: Fetch) -> Path:
    """Download the wheel of `requirement` without installing it, and return its path.

    With pip, the path is that of the wheel file; with uv, that of a folder with the unpacked wheel.

    Args:
        requirement: `package` or `package==version`.
        scratch: empty folder for the download and for temporary files.

    Raises:
        SourceError: the wheel could not be downloaded. `kind` is `disk_full` if the disk is full, and otherwise
            `repo_fetch_failed`, for example if neither pip nor uv is installed.
    """
    target = scratch / "wheel"
    # uv sets this variable for commands run by `uv run`. In that case uv's configuration applies.
    if "UV" in os.environ or importlib.util.find_spec("pip") is None:
        if (uv := _uv()) is not None:
            _run(_uv_command(uv, requirement, target, scratch / "uv"), {}, "uv", requirement, scratch, fetch)
            return target
        if (pip := _bundled_pip()) is None:
            raise _fetch_error(requirement, f"cannot be fetched: {_NO_INSTALLER}")
        path = os.pathsep.join(filter(None, (str(pip), os.environ.get("PYTHONPATH"))))
        version, environment = _numbers(pip.name), {"PYTHONPATH": path} | _indexes_of_uv()
    else:
        version, environment = _pip_version(), {}
    _run(_pip_command(requirement, target, version), environment, "pip", requirement, scratch, fetch)
    (wheel,) = target.iterdir()
    return wheel


def _uv() -> str | None:
    script_folder = str(Path(sys.executable).parent)
    uv = os.environ.get("UV") or shutil.which("uv") or shutil.which("uv", path=script_folder)
    return str(Path(uv).absolute()) if uv else None


def _uv_command(uv: str, requirement: str, target: Path, cache: Path) -> list[str]:
    # uv gets a cache folder of its own, on the same disk as `target`. The size of its files shows the progress, and the
    # caller deletes the folder at the end.
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-progress"]
    return [*command, "--python", sys.executable, "--cache-dir", str(cache), "--target", str(target), "--", requirement]


def _pip_command(requirement: str, target: Path, version: tuple[int, ...]) -> list[str]:
    command = ["pip", "download", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    progress = ["--progress-bar", "raw"] if version >= _PIP_WITH_PROGRESS else ["--quiet"]
    return [*command, *progress, "--dest", str(target), "--", requirement]


def _pip_version() -> tuple[int, ...]:
    try:
        return _numbers(version("pip"))
    except PackageNotFoundError:
        return (0,)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _bundled_pip() -> Path | None:
    """Return the wheel of pip that Python bundles, or None."""
    spec = importlib.util.find_spec("ensurepip")
    folders = [Path(spec.origin).with_name("_bundled")] if spec is not None and spec.origin else []
    if shared := sysconfig.get_config_var("WHEEL_PKG_DIR"):  # folder of the wheel in some Linux distributions
        folders.append(Path(shared))
    wheels = [wheel for folder in folders for wheel in folder.glob("pip-*.whl")]
    return max(wheels, default=None, key=lambda wheel: _numbers(wheel.name))


def _indexes_of_uv() -> dict[str, str]:
    """Return pip's variables for the package indexes that the user set only for uv."""
    variables = {}
    for pip, *names in _UV_INDEXES:
        value = next((os.environ[name] for name in names if os.environ.get(name)), None)
        if value is not None and not os.environ.get(pip):
            variables[pip] = " ".join(_NAME_OF_INDEX.sub("", url) for url in value.split())
    return variables


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    installer: str,
    requirement: str,
    scratch: Path,
    fetch: Fetch,
) -> None:
    errors, output = scratch / "errors", scratch / "output"
    # The installer exits when its standard input closes, so it does not outlive the server. Its temporary files go to
    # `scratch`, on the same disk as the cache, where their size can be measured.
    with errors.open("wb") as stderr, output.open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "helexa.neuron.processes.parent_watch", *command],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {"TMPDIR": str(scratch)} | dict(environment),
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                fetch.progress("download", *_progress(output, scratch))
                fetch.wait(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        error_text = errors.read_text(errors="replace")
        for number in (errno.ENOSPC, errno.EDQUOT):
            # A full disk may have no space for the error message itself.
            if os.strerror(number) in error_text or not (error_text.strip() or _can_write(scratch)):
                raise source_error(disk_error(OSError(number, ""), scratch.parent), f"pypi:{requirement}")
        raise _fetch_error(requirement, f"cannot be fetched by {installer}: {_last_error(error_text)}")


def _can_write(folder: Path) -> bool:
    """Return whether the disk of `folder` has space for a small file."""
    path = folder / "space"
    try:
        path.write_bytes(bytes(_TAIL_BYTES))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _progress(output: Path, scratch: Path) -> tuple[int, int]:
    """Return the downloaded bytes and the total bytes (0 if unknown), by pip's output."""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _TAIL_BYTES))
        if reports := _PIP_PROGRESS.findall(file.read()):
            done, total = reports[-1]
            return int(done), int(total)
    # If the output contains no numbers, the size of the largest file shows the progress.
    return _largest_file(scratch), 0


def _largest_file(folder: Path) -> int:
    largest = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # the installer has just moved the file
                largest = max(largest, (Path(path) / name).stat().st_size)
    return largest


def _last_error(text: str) -> str:
    if _NO_CONNECTION.search(text):  # pip's last line would only say that it has found no version of the package
        details = _CONNECTION_ERRORS.findall(text)
        why = f" ({details[-1]})" if details else ""
        return f"the package index cannot be reached{why}; check the network and the index settings of pip or uv"
    lines = [line.partition(": ")[2] for line in text.splitlines() if line.lower().startswith("error: ")]
    return lines[-1] if lines else " ".join(text.split())[-300:] or "no error output"


def _fetch_error(requirement: str, reason: str) -> SourceError:
    source = f"pypi:{requirement}"
    return SourceError(f"{source} {reason}", kind="repo_fetch_failed", model_id=source, cause=reason)
