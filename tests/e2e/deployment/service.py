"""Runs the service of an installed systemd unit with the unit's command, user, environment and folders."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Self

SECONDS = 120.0  # a limit for a busy machine
_FOLDERS = {"StateDirectory": "/var/lib", "CacheDirectory": "/var/cache", "ConfigurationDirectory": "/etc"}


class Service:
    """A running service of a unit with `Type=notify`. Leaving the `with` block ends it with SIGTERM.

    Args:
        unit: path of the installed unit.
        folder: folder for the log and the notification socket. Every user must be able to enter it.

    Attributes:
        log: path of the file with the service's output.
    """

    def __init__(self, unit: Path, folder: Path) -> None:
        settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
        user = settings["User"]
        for setting, parent in _FOLDERS.items():
            if name := settings.get(setting):
                path = Path(parent, name)
                path.mkdir(exist_ok=True)
                path.chmod(int(settings[f"{setting}Mode"], 8))
                if parent != "/etc":
                    shutil.chown(path, user, settings["Group"])
        environ = dict(pair.split("=", 1) for pair in settings["Environment"].split())
        as_user = ["setpriv", f"--reuid={user}", f"--regid={settings['Group']}", "--clear-groups", "--no-new-privs"]
        self.log = folder / f"{unit.stem}.log"
        address = folder / f"{unit.stem}.notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, self.log.open("wb") as log:
            manager.bind(str(address))
            address.chmod(0o666)
            manager.settimeout(SECONDS)
            self._process = subprocess.Popen(
                [*as_user, *settings["ExecStart"].split()],
                env={"PATH": os.defpath, "NOTIFY_SOCKET": str(address), **environ},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=int(settings["UMask"], 8),
            )
            try:
                assert manager.recv(100) == b"READY=1"
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            assert self._process.wait(SECONDS) == 0, self.log.read_text()
        finally:
            self._process.kill()
            self._process.wait()
