"""Child processes that find no torch."""

from pathlib import Path


def without_torch(folder: Path) -> dict[str, str]:
    """Write a module to `folder`, and return the environment variables with which Python processes find no torch."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    return {"PYTHONPATH": str(folder)}
