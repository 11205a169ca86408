"""Installs outside programs: each in its own virtual environment or npm folder, which later runs use again."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from programs import Program

from npm import NODE, NODE_PATH, NPM


class InstallError(Exception):
    """Error: the installation of an outside program failed. The message ends with the output of pip or npm."""


def prepare(program: Program, folder: Path) -> Path:
    """Install an outside program below `folder`, unless it is installed. Return the path of its environment.

    A program is installed again if the versions of its packages in programs.toml have changed.

    Raises:
        InstallError: pip or npm failed.
    """
    environment = (folder / program.name).absolute()
    settings = [f"{name}={value}" for name, value in program.build.items()]
    wanted = hashlib.sha256("\n".join((program.registry, *program.packages, *settings)).encode()).hexdigest()
    mark = environment / "installed"
    if mark.exists() and mark.read_text() == wanted:
        return environment
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir(parents=True)
    if program.registry == "pypi":
        _run([sys.executable, "-m", "venv", str(environment)], {})
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _run([*pip, *program.packages], program.build)
    elif program.registry == "npm":
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", f"--prefix={environment}"]
        _run([str(NODE), str(NPM), "install", *options, *program.packages], program.build)
    mark.write_text(wanted)
    return environment


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    ended = subprocess.run(
        command,
        env=os.environ | {"PATH": NODE_PATH, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise InstallError(f"{command[0]} ended with {ended.returncode}: {ended.stdout[-400:].strip()}")
