"""A real PostgreSQL server for tests, on a socket in a folder of its own."""

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
    """A running server; `stop` and `start` make it unreachable for a while.

    With a `primary` it is a hot standby of that server until `promote`.
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
        self._made = 0
        self._running = False

    def start(self) -> None:
        options = [f"-k {self._folder}", "-c listen_addresses=", "-c max_connections=200"]
        options += [f"-c {setting}" for setting in _UNSAFE_BUT_FAST]
        self._run("pg_ctl", "start", "-w", "-l", str(self._folder / "log"), "-o", " ".join(options))
        self._running = True

    def stop(self) -> None:
        """End it at once, as a crash does, if it runs."""
        if self._running:
            self._running = False
            self._run("pg_ctl", "stop", "-w", "-m", "immediate")

    def promote(self) -> None:
        """Make a standby accept writes."""
        self._run("pg_ctl", "promote", "-w")

    def set_read_only(self, on: bool) -> None:
        """Let sessions, those that are open too, refuse or accept writes."""
        self.do("postgres", f"ALTER SYSTEM SET default_transaction_read_only = {on}")
        self.do("postgres", "SELECT pg_reload_conf()")

    def wait_for_standbys(self) -> None:
        """Let each commit wait until a standby has it: a failover then loses no commit."""
        self.do("postgres", "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.do("postgres", "SELECT pg_reload_conf()")

    def new_database(self, *standbys: "Postgres") -> str:
        """The URL of an empty schema, which is as good as a database of its own and is made in no time.

        The URL lists `standbys` as further hosts.
        """
        self._made += 1
        self.do(_DATABASE, f"CREATE SCHEMA schema_{self._made}")
        hosts = ",".join(str(server._folder) for server in (self, *standbys))
        return f"postgresql://helexa@/{_DATABASE}?host={hosts}&search_path=schema_{self._made}"

    def do(self, database: str, sql: str) -> None:
        self._run("psql", "-h", str(self._folder), "-U", "helexa", "-d", database, "-qc", sql)

    def _run(self, program: str, *args: str) -> None:
        where = () if program == "psql" else ("-D", str(self._data))
        command = [*self._as_owner, _binary(program), *where, *args]
        # pg_ctl's server would keep a pipe open, so the output goes to a file
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
            output.seek(0)
            assert done.returncode == 0, f"{program} failed: {output.read()}"


@contextmanager
def running_postgres(primary: Postgres | None = None) -> Iterator[Postgres]:
    """A server, or a hot standby of `primary`, which the caller may stop to promote the standby."""
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
    """Where a program of PostgreSQL is: Debian keeps the server's off the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    found = str(versions[-1]) if versions else shutil.which(name)
    assert found, f"no PostgreSQL ({name}) on this machine; install it: apt-get install postgresql"
    return found
