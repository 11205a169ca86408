"""The state folder of `helexa up`: API keys, logs, and the running commands."""

import errno
import fcntl
import json
import os
import shutil
import signal
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from helexa.cli.gateway_client import DEFAULT_URL, Gateway
from helexa.cli.terminal_output_and_errors import CONFIG, UNREACHABLE, USAGE, CommandError
from helexa.core.address import is_loopback
from helexa.core.command_line import hide_argument
from helexa.core.config import read_secret
from helexa.core.errors import ConfigError
from helexa.cortex.access.keys import MAX_SECRET_BYTES, new_secret

_FILE = "running.json"
_POLL_SECONDS = 0.1
_STOP_SECONDS = 90.0


def _state_path(*names: str) -> Path:
    """Return the path of the state folder of `helexa up`, or of its subfolder `names`.

    The folder is `$XDG_STATE_HOME/helexa`, or `~/.local/state/helexa` if the variable is not set. The folder may be
    missing.
    """
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "state"
    return folder.joinpath("helexa", *names)


def state_folder(*names: str) -> Path:
    """Return the state folder of `helexa up` (see `_state_path`).

    Missing folders are created with mode 0700.

    Raises:
        CommandError: the folder cannot be created.
    """
    for count in range(len(names) + 1):
        folder = _state_path(*names[:count])
        with writing_to(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _state_path(*names)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Return a context that converts each `OSError` in it to a `CommandError`.

    `folder` is the folder that the code in the context writes to. The message names it.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space on the disk of this folder" if is_full else "make this folder writable"
        raise CommandError(
            f"cannot write to {folder}: {error.strerror}; {hint}, or set XDG_STATE_HOME to another folder"
        ) from None


def write_private(path: Path, text: str) -> None:
    """Write `text` to a file that only this user can read."""
    path.unlink(missing_ok=True)  # an existing file would keep its permissions
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)  # Readers would mistake a part of a key or of a configuration for the whole.
        raise


VARIABLE = "HELEXA_UP_API_KEY"
_SHORTEST = 8


def configured_key(option: str | None, file: Path | None, environ: Mapping[str, str]) -> str | None:
    """Return the API key of `helexa up`: `option`, or else from `file` or `VARIABLE`.

    Return None if no key is set. The text of `option` is overwritten in the command line that `ps` shows.

    Raises:
        CommandError: both option and file are given, the file cannot be read, or the key is invalid.
    """
    # The option is overwritten in the command line of this process, so that `ps` does not show the key.
    if option is not None:
        hide_argument(option)
        if file is not None:
            raise CommandError("--api-key and --api-key-file contradict each other; give one of them", USAGE)
        return _checked(option, "--api-key")
    if file is not None:
        try:
            return _checked(read_secret(file, "--api-key-file").get_secret_value(), f"the key in {file}")
        except ConfigError as error:
            raise CommandError(str(error), CONFIG) from None
    variable = environ.get(VARIABLE, "")
    return _checked(variable, VARIABLE) if variable else None


def _checked(text: str, name: str) -> str:
    if not (text.isascii() and text.isprintable() and " " not in text):
        raise CommandError(f"{name} must be printable ASCII without blanks; choose another key", USAGE)
    if not _SHORTEST <= len(text) <= MAX_SECRET_BYTES:
        raise CommandError(
            f"{name} must have {_SHORTEST} to {MAX_SECRET_BYTES} characters, but has {len(text)}; choose another key",
            USAGE,
        )
    return text


def generated_key(folder: Path) -> str:
    """Return the API key of `helexa up` that is stored in `folder`.

    If there is none, generate and store a key.

    Raises:
        CommandError: the stored key is invalid.
    """
    path = folder / "api_key"
    if path.exists():
        try:
            return _checked(path.read_text(encoding="utf-8").strip(), "the key")
        except (CommandError, UnicodeDecodeError):
            raise CommandError(f"{path} holds no API key; remove the file, and `helexa up` creates a new one") from None
    key = new_secret().get_secret_value()
    write_private(path, key + "\n")
    return key


def key_of_local_gateway(url: str) -> str | None:
    """Return the admin's key of the `helexa up` with the gateway `url`.

    The `helexa up` may have ended. Return None if `helexa up` has written no configuration for a gateway at `url`, or
    if this user cannot read it.
    """
    try:
        address = urlsplit(url)
        config = tomllib.loads((_state_path("up", str(address.port)) / "cortex.toml").read_text(encoding="utf-8"))
        listen, key = config["gateway"]["listen"], config["entitlements"]["keys"][0]["key"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return key if is_loopback(address.hostname or "") or listen == address.netloc else None


LOGS = {"node": "neuron.log", "gateway": "cortex.log"}  # file name of the log of each server
MAX_BYTES = 10_000_000


def log_files(folder: Path, log_folder: Path) -> dict[str, Path]:
    """Return the log files of `helexa up` in `log_folder`, by server.

    If `log_folder` is not the state folder `folder` of `helexa up`, create links to the log files in `folder`, which
    replace earlier links and log files.
    """
    files = {server: log_folder / name for server, name in LOGS.items()}
    for file in files.values():
        link = folder / file.name
        if link.is_symlink():
            link.unlink()  # the link is from an earlier start with another --log-dir
        if log_folder != folder:
            link.unlink(missing_ok=True)
            link.symlink_to(file)
    return files


def limit_size(log: Path) -> None:
    """Empty the log file of a server if it is larger than `MAX_BYTES`.

    The lines are copied to `NAME.1` first. If the copy fails, or if the server appends lines during the copy, lines are
    lost.
    """
    with suppress(OSError):
        if log.stat().st_size <= MAX_BYTES:
            return
        older = log.with_name(f"{log.name}.1")
        try:
            shutil.copyfile(log, older)
        except OSError:  # the disk is full: free the space of the older lines
            older.unlink(missing_ok=True)
        with log.open("r+b") as file:
            file.truncate(0)


def newest_folder(port: int | None) -> Path:
    """Return the state folder of the `helexa up` whose gateway has the port `port`.

    If `port` is None, return the folder whose log changed last.

    Raises:
        CommandError: no `helexa up`, or none with this port, has written a log.
    """
    base = state_folder("up")
    folders = [base / str(port)] if port is not None else [entry for entry in base.iterdir() if entry.is_dir()]
    changed = {folder: max(map(_changed_at, (folder / name for name in LOGS.values()))) for folder in folders}
    newest = max(changed, key=lambda folder: changed[folder], default=None)
    if newest is None or not changed[newest]:
        where = f"on port {port} " if port is not None else ""
        raise CommandError(f"no `helexa up` {where}has written a log to {base}; start one with `helexa up`")
    return newest


def _changed_at(log: Path) -> float:
    try:
        return log.stat().st_mtime
    except OSError:
        return 0.0


@dataclass(frozen=True)
class RunningUp:
    """A `helexa up` of this user that runs on this machine."""

    url: str  # base URL of the gateway that the command started
    port: int  # port of the gateway
    pid: int  # process id of the command

    def gateway(self) -> Gateway:
        """Return a client of the gateway, with an admin's key."""
        return Gateway(self.url, key_of_local_gateway(self.url))

    def stop(self) -> None:
        """Stop the command like Ctrl-C, and wait until its servers have ended.

        Raises:
            CommandError: the command has not ended after `_STOP_SECONDS`.
        """
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while any(other.pid == self.pid for other in running_ups()):
            if time.monotonic() > deadline:
                raise CommandError(
                    f"`helexa up` with the process id {self.pid} does not end; kill it with `kill -9 {self.pid}`"
                )
            time.sleep(_POLL_SECONDS)


@contextmanager
def recorded(folder: Path, url: str) -> Iterator[None]:
    """Return a context in which `running_ups` lists this `helexa up`.

    `folder` is the state folder whose name is the port of the gateway.
    """
    path = folder / _FILE
    with writing_to(folder):
        write_private(path, json.dumps({"url": url, "pid": os.getpid(), "system": _system()}))
    with path.open("r+b") as file:  # writable, because NFS requires this for an exclusive lock
        with suppress(OSError):  # If the file system has no locks, `_is_held` checks the process id.
            # This call waits for microseconds at most, because other commands release the lock right after their check.
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running_ups() -> list[RunningUp]:
    """Return this user's running `helexa up` commands, sorted by port."""
    found: list[RunningUp] = []
    try:
        folders = list(_state_path("up").iterdir())
    except OSError:
        return []
    for folder in folders:
        try:
            with (folder / _FILE).open("rb") as file:
                record = json.loads(file.read(10_000))
                up = RunningUp(str(record["url"]), int(folder.name), int(record["pid"]))
                # The state folder may be on a network drive. Skip records of other hosts, whose process ids and whose
                # address 127.0.0.1 have no meaning on this host.
                if record["system"] == _system() and _is_held(file.fileno(), up.pid):
                    found.append(up)
        except (OSError, ValueError, LookupError, TypeError):
            continue  # no `helexa up` runs with this port
    return sorted(found, key=lambda up: up.port)


def local_gateway(url: str | None) -> Gateway:
    """Return a client of the gateway at `url`, else HELEXA_BASE_URL, else `helexa up`.

    If no `helexa up` runs, the URL is `DEFAULT_URL`. The API key is HELEXA_API_KEY. If it is not set, the key is the
    admin's key of the running `helexa up` with the gateway's port. Another program that listens on the port of an ended
    `helexa up` does not get this key.

    Raises:
        CommandError: no URL is given, several `helexa up` run, and none of them has the URL `DEFAULT_URL`.
    """
    url = url or os.environ.get("HELEXA_BASE_URL") or _default_url()
    key = os.environ.get("HELEXA_API_KEY")
    if not key and any(up.port == urlsplit(url).port for up in running_ups()):
        key = key_of_local_gateway(url)
    return Gateway(url, key)


def only_running(port: int | None) -> RunningUp:
    """Return the running `helexa up` of this user with the port `port`.

    If `port` is None, return the only running `helexa up`.

    Raises:
        CommandError: no `helexa up` runs, or `port` is None and several run.
    """
    found = [up for up in running_ups() if port in (None, up.port)]
    if not found:
        where = "" if port is None else f" with port {port}"
        raise CommandError(
            f"no `helexa up`{where} of this user runs on this machine; start one with `helexa up`", UNREACHABLE
        )
    if len(found) > 1:
        ports = ", ".join(str(up.port) for up in found)
        raise CommandError(f"several `helexa up` run on this machine; choose one with --port: {ports}", USAGE)
    return found[0]


def _default_url() -> str:
    found = running_ups()
    if not found or any(up.url == DEFAULT_URL for up in found):
        return DEFAULT_URL
    if len(found) > 1:
        urls = ", ".join(up.url for up in found)
        raise CommandError(f"several `helexa up` run on this machine; choose one with --url: {urls}", USAGE)
    return found[0].url


def _system() -> str:
    """Return an id of the booted system and the PID namespace; "" except on Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _is_held(descriptor: int, pid: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # The file system has no locks. Check whether the process id belongs to a `helexa` process.
        with suppress(OSError):
            return b"helexa" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
