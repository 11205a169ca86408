"""A real PostgreSQL server for tests, listening on a Unix socket in its own folder."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DATABASE = "test_ledger"
_UNSAFE_BUT_FAST = ("fsync=off", "full_page_writes=off")


class Postgres:
    """A PostgreSQL server. `stop` makes it unreachable until `start`.

    If `primary` is given, the server is a hot standby of that server until `promote`.
    """

    def __init__(self, folder: Path, primary: "Postgres | None" = None) -> None:
        self._folder, self._data = folder, folder / "data"
        self._as_owner: list[str] = []
        if os.geteuid() == 0:  # the server refuses root
            owner = pwd.getpwnam("postgres")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            self._as_owner = ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]
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
        command = [*self._as_owner, _binary(program), *where, *args]
        # the server that pg_ctl starts would keep a pipe open, so the output goes to a file
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.run(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
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


def _binary(name: str) -> str:
    """Return the path of a PostgreSQL program. Debian keeps the server's programs off the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda program: int(program.parts[4]))
    path = str(versions[-1]) if versions else shutil.which(name)
    assert path, f"no PostgreSQL ({name}) on this machine; install it: apt-get install postgresql"
    return path
