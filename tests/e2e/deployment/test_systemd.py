"""The systemd units in `deploy/systemd`."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deployment.conftest import DEPLOY
from helexa.bench import config as bench_config
from helexa.core import catalog
from helexa.cortex import config as cortex_config
from helexa.neuron.config import read_config

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MOST_EXPOSURE = 30  # tenths


@pytest.fixture
def analyze(program: Callable[[str, str], str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    command = program("systemd-analyze", "systemd")

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([command, *map(str, arguments)], check=False, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_unit_is_valid_and_hardened(
    analyze: Callable[..., subprocess.CompletedProcess[str]], unit: Path, tmp_path
):
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/usr/bin/", f"{Path(sys.executable).parent}/"))
    verified = analyze("verify", "--man=no", copy)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    rated = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", unit)
    assert rated.returncode == 0, rated.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_unit_matches_the_packaged_users_and_configuration(unit: Path) -> None:
    text = unit.read_text()
    users = re.findall(r"^u (\S+)", (DEPLOY / "systemd" / "helexa.sysusers.conf").read_text(), re.MULTILINE)
    assert re.findall(r"^User=(\S+)", text, re.MULTILINE)[0] in users
    (config,) = re.findall(r"^ExecStart=.* --config /etc/\S+/(\S+)$", text, re.MULTILINE)
    assert (DEPLOY / "config" / config).is_file()
    stop_secs = int(re.findall(r"^TimeoutStopSec=(\d+)", text, re.MULTILINE)[0])
    for drain_secs in re.findall(r"^drain_secs = (\d+)", (DEPLOY / "config" / config).read_text(), re.MULTILINE):
        assert int(drain_secs) < stop_secs


def test_packaged_configurations_of_gateway_and_bench_contain_the_nodes_address() -> None:
    folder = DEPLOY / "config"
    gateway, node = cortex_config.load(folder / "cortex.toml"), read_config(folder / "neuron.toml")
    bench = bench_config.load(folder / "helexa-bench.toml")
    assert [neuron.endpoint for neuron in gateway.neurons] == [f"http://{node.host}:{node.port}"]
    assert [target.endpoint for target in bench.targets] == [f"http://{node.host}:{node.port}"]
    assert catalog.load(folder / gateway.models_config.name).models == []
