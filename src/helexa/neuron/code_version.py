"""Version of the node's code, which must be equal on all hosts of a group."""

import hashlib
from functools import cache
from pathlib import Path

from helexa.core.version import __version__

_NEURON = Path(__file__).parent


@cache
def code_version() -> str:
    """Return helexa's version, and a digest of all Python and C files of the node."""
    digest = hashlib.sha256()
    for path in sorted((*_NEURON.rglob("*.py"), *_NEURON.rglob("*.[ch]"))):
        digest.update(f"\0{path.relative_to(_NEURON).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return f"{__version__} {digest.hexdigest()[:16]}"
