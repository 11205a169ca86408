#!/usr/bin/env python3
"""Print a requirement of pip for the newest CPU build of PyTorch that the configured indexes have, or nothing.

Without this requirement, pip would prefer a newer version with gigabytes of CUDA libraries. If there is an NVIDIA
device, or no index has a CPU build, nothing is printed, and pip chooses.
"""

import subprocess
import sys
from pathlib import Path


def requirement(listing: str) -> str:
    """Return the requirement for the first CPU build in the output of `pip index versions torch`, newest first."""
    line = next((line for line in listing.splitlines() if line.startswith("Available versions:")), "")
    versions = [version.strip() for version in line.partition(":")[2].split(",")]
    return next((f"torch=={version}" for version in versions if version.endswith("+cpu")), "")


if __name__ == "__main__" and not Path("/dev/nvidiactl").exists():
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    print(requirement(subprocess.run(command, capture_output=True, text=True, check=False).stdout))
