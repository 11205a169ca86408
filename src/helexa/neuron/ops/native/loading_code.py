"""Version of the Python code that reads, quantizes and packs the weights of a checkpoint."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

_NEURON = Path(__file__).parents[2]
_PACKAGES = ("layers", "models", "ops", "weights")  # read, permute, quantize and pack weights


@cache
def loading_code_version() -> str:
    """Return a digest of helexa's version and of all Python files that can affect packed weights.

    These are the files of the packages `layers`, `models`, `ops` and `weights` of `helexa.neuron`.
    """
    digest = hashlib.sha256(version("helexa").encode())
    for package in _PACKAGES:
        for path in sorted((_NEURON / package).rglob("*.py")):
            digest.update(f"\0{path.relative_to(_NEURON).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
