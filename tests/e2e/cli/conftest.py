"""Fixtures: run the `helexa` command as a process with its own state directory."""

import os
import subprocess
import sys

import pytest

from cli.canned_gateway import CannedGateway

UNWANTED = ("HELEXA_", "CORTEX_", "NEURON_", "NO_COLOR", "FORCE_COLOR", "XDG_")


@pytest.fixture
def gateway():
    server = CannedGateway()
    yield server
    server.close()


@pytest.fixture
def environ(tmp_path):
    variables = {name: value for name, value in os.environ.items() if not name.startswith(UNWANTED)}
    return variables | {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "PYTHONWARNINGS": "error"}


@pytest.fixture
def helexa(environ):
    """Return a function that runs `helexa ARGUMENTS` and returns the completed process; stdin is empty by default."""

    def run(*arguments, stdin="", **variables):
        return subprocess.run(
            [sys.executable, "-m", "helexa", *arguments],
            check=False,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env=environ | variables,
        )

    return run
