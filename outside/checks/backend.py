"""Starts a server of another project, and a gateway of helexa whose only node is this server."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checking import MODEL, SETTINGS, URL

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from ports import free_port

FOLDER = Path(os.environ["HOME"])
START_SECONDS = 300.0
ADMIN, KEY, COUNTED, CAPPED = "admin-key", "any-key", "counted-key", "capped-key"
SERVER_KEY = SETTINGS.get("key", "any")
CAP = 1500
"""Number of tokens that the key `CAPPED` may use."""

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def get(url: str, key: str = KEY) -> Any:
    """Return the JSON response to a GET request.

    Raises:
        OSError: the server does not answer, or answers with an error.
    """
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    with _open(request, timeout=10) as response:
        return json.load(response)


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Call `condition` until it returns a true value, and return this value. An `OSError` counts as false."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"timeout while waiting until {what}")


class Backend:
    """The process of the tested server.

    Attributes:
        url: base URL of the server.
    """

    def __init__(self) -> None:
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self, arguments: Sequence[str] = ()) -> None:
        """Start the server with additional arguments, and wait until it lists the model."""
        for name, text in SETTINGS.get("files", {}).items():
            (FOLDER / name).write_text(self._filled(text))
        with (FOLDER / "backend.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._filled(argument) for argument in (*SETTINGS["command"], *arguments)],
                env=os.environ | SETTINGS.get("environment", {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually(self._listed, "the server lists the model")

    def end(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _listed(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the server ended:\n{(FOLDER / 'backend.log').read_text()[-800:]}"
        return any(entry["id"] == MODEL for entry in get(f"{self.url}/v1/models", SERVER_KEY)["data"])

    def _filled(self, text: str) -> str:
        values = {
            "environment": os.environ["OUTSIDE_ENVIRONMENT"],
            "checks": str(Path(__file__).parent),
            "templates": os.environ["OUTSIDE_TEMPLATES"],
            "folder": str(FOLDER),
            "file": os.environ["OUTSIDE_TOOLS_FILE"],
            "id": MODEL,
            "url": URL,
            "port": str(self._port),
        }
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text


@contextmanager
def gateway(backend: Backend) -> Iterator[str]:
    """Run a gateway in front of the server during the `with` block. Yield the gateway's base URL."""
    port, metrics = free_port(), free_port()
    keys = {
        ADMIN: 'role = "admin"',
        KEY: "",
        COUNTED: "hard_cap = 1000000",
        CAPPED: f"hard_cap = {CAP}",
    }
    entries = [
        f'[[entitlements.keys]]\nkey = "{key}"\naccount_id = "{key}"\n{fields}\n' for key, fields in keys.items()
    ]
    config = FOLDER / "cortex.toml"
    config.write_text(
        f'[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:{metrics}"\npoll_interval_secs = 1\n'
        f'[ledger]\nurl = "sqlite:{FOLDER}/cortex.db"\n'
        f'[[neurons]]\nname = "backend"\nkind = "openai"\nendpoint = "{backend.url}"\nbearer = "{SERVER_KEY}"\n'
        f"[entitlements]\nrequire_auth = true\n{''.join(entries)}"
    )
    with (FOLDER / "gateway.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "helexa.cortex", "serve", "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: serves(url), "the gateway lists the model")
        yield url
    finally:
        process.terminate()
        process.wait()
        print((FOLDER / "gateway.log").read_text(), flush=True)
        print((FOLDER / "backend.log").read_text()[-100_000:], flush=True)


def serves(url: str) -> bool:
    """Return whether the gateway at `url` can serve the model now."""
    return any(entry["id"] == MODEL and entry["state"] == "warm" for entry in get(f"{url}/v1/models")["data"])
