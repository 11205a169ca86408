"""The command line as a person runs it: a process of its own, in a home of its own."""

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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(UNWANTED)}
    return kept | {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "PYTHONWARNINGS": "error"}


@pytest.fixture
def helexa(environ):
    """Run the command to its end; stdin is empty unless given."""

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
