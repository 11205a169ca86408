"""Virtual environments with what `pip install helexa` installs: helexa and its required dependencies."""

import re
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def bare_venv(folder: Path, extras: Iterable[str] = (), without: Iterable[str] = ()) -> Path:
    """Create a virtual environment in `folder` from links to installed packages; return the path of its Python.

    Args:
        extras: extras of helexa whose dependencies are included.
        without: distributions that are left out.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in _required("helexa", frozenset(extras)).difference(without):
        installed = distribution(name)
        for top in {Path(file).parts[0] for file in installed.files or () if not file.name.startswith("_editable")}:
            source, link = Path(str(installed.locate_file(top))), packages / top
            if top not in ("..", "__pycache__") and not link.is_symlink():
                link.symlink_to(source)
    if not (packages / "helexa").exists():
        import helexa

        (packages / "helexa").symlink_to(Path(helexa.__file__).parent)
    return folder / "bin" / "python"


def _required(name: str, extras: frozenset[str]) -> set[str]:
    """Return the names of a distribution and of its dependencies, direct and indirect."""
    from packaging.requirements import Requirement

    names: set[str] = set()
    waiting = [(name, extras)]
    while waiting:
        name, wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in names:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        names.add(name)
        for requirement in map(Requirement, requirements):
            environments = [{"extra": extra} for extra in ("", *wanted)]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return names
