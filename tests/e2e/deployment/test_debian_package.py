"""The Debian package: built, installed, and run by its units. Changes the machine, so it needs root."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.stack import get, post
from deployment.conftest import DEPLOY
from deployment.service import SECONDS, Service

UNITS = Path("/usr/lib/systemd/system")
MODEL = Path("/var/lib/neuron/model.gguf")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def run(*command: str | Path, **environ: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **environ})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def installed(program: Callable[[str, str], str], tmp_path: Path) -> Iterator[None]:
    """The installed package, with all dependencies."""
    for name, package in (("dpkg-deb", "dpkg"), ("systemd-sysusers", "systemd"), ("setpriv", "util-linux")):
        program(name, package)
    if os.geteuid() != 0:
        pytest.skip("the installation of a package needs root")
    if shutil.which("neuron", path="/usr/bin"):
        pytest.skip("helexa is already installed on this machine")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, DEPLOY.parent)
    (wheel,) = tmp_path.glob("*.whl")
    build = [DEPLOY / "packages" / "build_deb.sh", wheel, tmp_path / "deb", "neuron,postgres"]
    output = run(*build, PIP=f"{sys.executable} -m pip", DEB_COMPRESSION="none")
    package = output.splitlines()[-1]
    run("dpkg", "--install", package)
    try:
        yield
    finally:
        run("dpkg", "--purge", "helexa")
        for name in ("cortex", "neuron", "helexa-bench"):
            shutil.rmtree(f"/var/lib/{name}", ignore_errors=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users can enter. pytest's own folders are private."""
    with tempfile.TemporaryDirectory(prefix="helexa-services-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_installed_debian_package_runs_node_and_gateway_by_their_systemd_units(
    installed: None, smollm2_gguf: Path, open_folder: Path
) -> None:
    MODEL.parent.mkdir(exist_ok=True)
    shutil.copy(smollm2_gguf, MODEL)
    MODEL.chmod(0o644)
    with Path("/etc/neuron/neuron.toml").open("a") as config:
        config.write(f'[[default_models]]\nmodel_id = "tiny"\nsource = "file:{MODEL}"\n')
    node_url, url = "http://127.0.0.1:13131", "http://127.0.0.1:31313"
    with (
        Service(UNITS / "neuron.service", open_folder) as node,
        Service(UNITS / "cortex.service", open_folder) as gateway,
    ):
        deadline = time.monotonic() + SECONDS
        while not any(model["loaded"] for model in get(f"{url}/v1/models")["data"]):
            assert time.monotonic() < deadline, node.log.read_text() + gateway.log.read_text()
            time.sleep(0.1)
        assert get(f"{node_url}/health/ready")["ready"] and get(f"{url}/health/ready")["ready"]
        request = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
        status, _, answer = post(f"{url}/v1/chat/completions", request)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        assert Path("/var/lib/cortex/cortex.db").stat().st_uid == shutil._get_uid("cortex")  # type: ignore[attr-defined]
        keys = ("setpriv", "--reuid=cortex", "--regid=cortex", "--clear-groups", "cortex", "keys")
        assert "ops" in run(*keys, "create", "-c", "/etc/cortex/cortex.toml", "--account", "ops", "--admin")
    assert "Traceback" not in node.log.read_text() + gateway.log.read_text()
