"""Programs from npm's registry, installed by package name, checked by hash and cached between runs."""

import json
import os
import subprocess
from pathlib import Path

from nodejs import NODE, NODE_PATH, NPM
from packages import CACHE


def installed(package: str, integrity: str | None = None) -> Path:
    """Install a package from npm's registry and return its `node_modules` folder, cached between runs.

    The package's install scripts are not run.

    Args:
        package: the package's name and version, such as `@scope/name@1.2.3`.
        integrity: the expected hash of the package's archive in npm's format, `sha512-...`.
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
        actual = lock["packages"][f"node_modules/{package.rpartition('@')[0]}"]["integrity"]
        assert actual == integrity, f"{package} has {actual}, expected {integrity}"
    return folder / "node_modules"
