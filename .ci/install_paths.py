#!/usr/bin/env python3
"""Install the wheel with pip, pipx, `uv tool` and `uvx`, each with an empty home folder, and get an answer from each.

    install_paths.py DIST TOOLS [PATH...]

DIST is a folder with one wheel for this machine, and TOOLS the `bin` folder of an environment with pipx and uv. PATH
names the install paths to try, by default all. No install path sees a C compiler, so the kernels must be prebuilt. The
dependencies come from the indexes that the variables and configuration files of pip and uv name.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

PROGRAMS = ("bash", "cat", "dirname", "env", "git", "ldconfig", "readlink", "realpath", "sh", "uname")
"""Programs that the install paths may use. No C compiler is among them."""

PROMPT = "What is the capital city of France? Answer in one word."
SECONDS = 900


class Machine:
    """An empty home folder, and a PATH without a C compiler.

    Args:
        folder: empty folder, in which the home folder and the PATH are created.
        index: URL of the package index with helexa's wheel.
        requirement: helexa with the extra `neuron` and the version of the wheel.
        tools: folder with the programs `pipx`, `uv` and `uvx`.
        downloads: cache folder for pip and uv, which all install paths share.
    """

    def __init__(self, folder: Path, index: str, requirement: str, tools: Path, downloads: Path) -> None:
        self.home, self.requirement, self.tools = folder / "home", requirement, tools
        self.home.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        for name in PROGRAMS:
            if (path := shutil.which(name)) is not None:
                (programs / name).symlink_to(path)
        (programs / "python3").symlink_to(sys.executable)
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_", "LANG"))}
        proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        added = {name: f"{index} {os.environ.get(name, '')}".strip() for name in ("PIP_EXTRA_INDEX_URL", "UV_INDEX")}
        caches = {"PIP_CACHE_DIR": str(downloads / "pip"), "UV_CACHE_DIR": str(downloads / "uv")}
        self._environment = kept | proxies | added | caches | {"HOME": str(self.home), "PATH": str(programs)}

    def run(self, *command: str | Path) -> str:
        """Run a command and return its output. Raises `subprocess.CalledProcessError` if the command fails."""
        return subprocess.run(
            command,
            env=self._environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=SECONDS,
        ).stdout


def pip(machine: Machine) -> list[str]:
    """Install with pip into a virtual environment."""
    machine.run(sys.executable, "-m", "venv", "venv")
    machine.run("venv/bin/python", "-m", "pip", "install", "-q", machine.requirement)
    return [str(machine.home / "venv/bin/helexa")]


def pipx(machine: Machine) -> list[str]:
    """Install with pipx."""
    machine.run(machine.tools / "pipx", "install", "--quiet", "--python", sys.executable, machine.requirement)
    return [str(machine.home / ".local/bin/helexa")]


def uv_tool(machine: Machine) -> list[str]:
    """Install with `uv tool install`."""
    machine.run(machine.tools / "uv", "tool", "install", "-q", "--python", sys.executable, machine.requirement)
    return [str(machine.home / ".local/bin/helexa")]


def uvx(machine: Machine) -> list[str]:
    """Run helexa without installing it."""
    return [str(machine.tools / "uvx"), "-q", "--python", sys.executable, machine.requirement]


PATHS: dict[str, Callable[[Machine], list[str]]] = {"pip": pip, "pipx": pipx, "uv tool": uv_tool, "uvx": uvx}
"""Functions that install helexa. Each returns the command of the installed program `helexa`."""


def check(machine: Machine, install: Callable[[Machine], list[str]]) -> str:
    """Install helexa and return the first answer of its default model.

    Raises:
        RuntimeError: the answer is wrong, or the engine does not use prebuilt kernels.
        subprocess.CalledProcessError: a command failed.
        subprocess.TimeoutExpired: a command took more than 900 s.
    """
    helexa = install(machine)
    answer = machine.run(*helexa, "run", "helexa/small", PROMPT, "--temperature", "0", "--max-tokens", "16").strip()
    if "Paris" not in answer:
        raise RuntimeError(f"the answer is {answer!r}")
    report = machine.run(*helexa, "doctor")
    if ": prebuilt for " not in report:
        raise RuntimeError(f"the kernels are not prebuilt:\n{report}")
    return f"{machine.run(*helexa, '--version').strip()} answers {answer!r}"


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: pip and uv request every dependency here too, and get the status 404."""


@contextmanager
def package_index(wheel: Path, folder: Path) -> Iterator[str]:
    """Serve a package index that contains only `wheel`, with files in `folder`; return the URL."""
    package = folder / "simple" / "helexa"
    package.mkdir(parents=True)
    shutil.copy(wheel, package)
    (package / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def main() -> None:
    """Try the install paths, print one line for each, and exit with status 1 if one failed."""
    dist, tools, *names = sys.argv[1:]
    (wheel,) = Path(dist).absolute().glob("helexa-*.whl")
    failed = []
    with (
        tempfile.TemporaryDirectory(prefix="helexa-install.") as temporary,
        package_index(wheel, Path(temporary)) as index,
    ):
        with zipfile.ZipFile(wheel) as archive:
            built = archive.read("helexa/core/build.json").decode()
        print(f"{wheel.name}, built from {built}")
        requirement = f"helexa[neuron]=={wheel.name.split('-')[1]}"
        for name in names or PATHS:
            folder = Path(temporary, name.replace(" ", "-"))
            folder.mkdir()
            machine = Machine(folder, index, requirement, Path(tools).absolute(), Path(temporary, "downloads"))
            try:
                print(f"{name}: {check(machine, PATHS[name])}", flush=True)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                failed.append(name)
                print(f"{name}: failed: {error}", flush=True)
            shutil.rmtree(folder)
    if failed:
        sys.exit(f"install paths that failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
