"""The choice of a CPU build of PyTorch for development environments and checks."""

import runpy
from pathlib import Path

import pytest

requirement = runpy.run_path(str(Path(__file__).parents[3] / ".ci" / "cpu_torch.py"))["requirement"]


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1+cpu, 2.13.0+cpu, 2.13.0\n", "torch==2.14.1+cpu"),
        ("torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0\n", ""),
        ("ERROR: No matching distribution found for torch\n", ""),
    ],
)
def test_requirement_for_cpu_torch_is_the_newest_cpu_build_in_the_package_list(listing: str, expected: str) -> None:
    assert requirement(listing) == expected
