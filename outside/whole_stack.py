"""Starts a gateway and a node with the command `helexa up`, as users do, but on free ports and with several models."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from clients.stack import free_port, get

_UNWANTED = ("HELEXA_", "CORTEX_", "NEURON_", "OPENAI_", "ANTHROPIC_")
_START_SECONDS = 600.0
_END_SECONDS = 60.0


@contextmanager
def serving(models: list[Path], folder: Path, on_demand: Mapping[str, Path]) -> Iterator[str]:
    """Run a gateway and a node with `models` during the `with` block. Yield the gateway's base URL.

    Args:
        models: paths of the model files.
        folder: folder for logs.
        on_demand: further model files by model id, which the node loads when a request names them.

    Raises:
        RuntimeError: not all models could be served. The message ends with the log of `helexa up`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shelf = folder / "models"
    shutil.rmtree(shelf, ignore_errors=True)
    shelf.mkdir()
    for name, model in on_demand.items():
        (shelf / f"{name}.gguf").symlink_to(model)
    gateway, metrics, node = free_port(), free_port(), free_port()
    arguments = [f"--models-dir={shelf}", *(f"--model={model}" for model in models)]
    arguments += [f"--port={gateway}", f"--metrics-port={metrics}", f"--neuron-port={node}", f"--log-dir={folder}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_UNWANTED)}
    environ |= {"XDG_STATE_HOME": str(folder), "NEURON_HARNESS__TORCH__KV_CACHE_MB": "1024"}
    environ["NEURON_HARNESS__TORCH__CONTEXT_LIMIT__ENABLED"] = "false"  # long prompts of agents are slow on a busy CPU
    log = folder / "up.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "helexa", "up", *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        url = f"http://127.0.0.1:{gateway}"
        _wait(process, url, {model.stem for model in models}, log)
        yield url
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, wanted: set[str], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            served = {entry["id"] for entry in get(f"{url}/v1/models")["data"] if entry.get("loaded")}
        except OSError:
            served = set()
        if wanted <= served:
            return
        time.sleep(0.2)
    raise RuntimeError(f"the stack does not serve {sorted(wanted)}:\n{log.read_text()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(children, timeout=5)[1]:
        child.kill()
