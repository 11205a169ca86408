"""The version of the code that turns a checkpoint's tensors into packed weights."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

_NEURON = Path(__file__).parents[2]
_PACKAGES = ("layers", "models", "ops", "weights")  # read, permute, quantize and pack weights


@cache
def loading_code_version() -> str:
    """Return a digest that changes with helexa's version and with any Python source that may shape packed weights.

    The digest covers whole packages: a list of single modules would miss the next one that permutes a tensor.
    """
    digest = hashlib.sha256(version("helexa").encode())
    for package in _PACKAGES:
        for path in sorted((_NEURON / package).rglob("*.py")):
            digest.update(f"\0{path.relative_to(_NEURON).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
