"""The RPM package, built by a real rpmbuild."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deployment.conftest import DEPLOY

FILES = (
    "/usr/bin/cortex",
    "/opt/helexa/bin/neuron",
    "/usr/lib/systemd/system/neuron.service",
    "/usr/lib/sysusers.d/helexa.conf",
    "/etc/cortex/cortex.toml",
)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_rpm_package_contains_programs_systemd_units_and_configuration(
    program: Callable[[str, str], str], tmp_path: Path
) -> None:
    rpmbuild, rpm = program("rpmbuild", "rpm"), program("rpm", "rpm")
    source = DEPLOY.parent
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    settings = {"_topdir": tmp_path, "wheel": wheel, "source": source, "extras": "postgres"}
    defines = [part for name, value in settings.items() for part in ("--define", f"{name} {value}")]
    done = subprocess.run(
        [rpmbuild, "-bb", DEPLOY / "packages" / "helexa.spec", *defines],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PIP": " ".join(pip)},
    )
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("RPMS/*/*.rpm")
    listed = subprocess.run([rpm, "-qpl", package], check=True, capture_output=True, text=True).stdout.splitlines()
    assert set(FILES) <= set(listed)
    listed = subprocess.run([rpm, "-qpc", package], check=True, capture_output=True, text=True).stdout.splitlines()
    assert "/etc/neuron/neuron.toml" in listed
