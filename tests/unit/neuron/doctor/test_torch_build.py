"""The check for CUDA libraries that a machine without an NVIDIA device cannot use."""

from importlib.metadata import distributions
from pathlib import Path

import pytest

from helexa.core.node_reports import Device, Discovery
from helexa.neuron import doctor_machine


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the packages of a CUDA build of torch, as pip installs them."""
    for name, size in (("torch", 500), ("nvidia_cublas", 3_000_000_000), ("nvidia_ml_py", 7), ("cuda_toolkit", 100)):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        (folder / "RECORD").write_text(f"{name}/lib.so,sha256=x,{size}\n{name}-1.0.dist-info/RECORD,,\n")
    return tmp_path


def test_reported_size_of_cuda_counts_only_the_libraries_of_cuda(packages: Path) -> None:
    assert doctor_machine.cuda_library_bytes(distributions(path=[str(packages)])) == 3_000_000_100


def test_doctor_notes_a_cuda_build_of_torch_without_a_gpu(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "distributions", lambda: distributions(path=[str(packages)]))
    monkeypatch.setattr(doctor_machine, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(doctor_machine, "discover", lambda: Discovery(hostname="h", os="Linux"))
    [result] = doctor_machine.look_at_torch_build()
    assert result.level == "note"
    assert "a CUDA build with 3.0 GB of libraries" in result.text
    assert "--torch-backend cpu" in result.text
    device = Device(index=0, name="GPU", vram_total_mb=1)
    monkeypatch.setattr(doctor_machine, "discover", lambda: Discovery(hostname="h", os="Linux", devices=[device]))
    assert list(doctor_machine.look_at_torch_build()) == []
    monkeypatch.setattr(doctor_machine, "discover", lambda: Discovery(hostname="h", os="Linux"))
    monkeypatch.setattr(doctor_machine, "has_nvidia_driver", lambda: True)
    assert list(doctor_machine.look_at_torch_build()) == []


def test_cpu_build_of_torch_has_no_cuda_libraries(tmp_path: Path) -> None:
    assert doctor_machine.cuda_library_bytes(distributions(path=[str(tmp_path)])) == 0
