"""Fixtures for tests of the files in `deploy/`."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cortex.gateway_fixtures import node

DEPLOY = Path(__file__).parents[3] / "deploy"

__all__ = ["node"]

_FOLDERS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@pytest.fixture
def program() -> Callable[[str, str], str]:
    """A function that returns the path of a program of Debian, or skips the test and names the missing package.

    pytest lists the skipped tests with their reasons at the end of its output.
    """

    def find(name: str, package: str) -> str:
        path = shutil.which(name, path=_FOLDERS)
        if path is None:
            pytest.skip(f"{name} is not installed: apt-get install {package}")
        return path

    return find


def adapted(text: str, replacements: dict[str, str]) -> str:
    """Return the text of a file with other addresses and paths. Each original must occur in the text."""
    for original, replacement in replacements.items():
        assert original in text
        text = text.replace(original, replacement)
    return text
