#!/usr/bin/env python3
"""Check that a tag can be released: check_release.py TAG.

The tag must be `v` and helexa's version, the changelog must have a dated section for the version, and the section
"Unreleased" must be empty.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, version: str, changelog: str) -> list[str]:
    """Return what prevents a release, one line each; empty if nothing does."""
    lines = []
    if tag != f"v{version}":
        lines.append(f"the tag is {tag}, but src/helexa/core/version.py has the version {version}")
    sections = dict(re.findall(r"^## (\[.*?\].*?)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL))
    if not any(re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", title) for title in sections):
        lines.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    if sections.get("[Unreleased]", "").strip():
        lines.append("CHANGELOG.md has unreleased entries; move them to the section of the version")
    return lines


def main() -> None:
    """Print the problems of the tag on the command line, and exit with status 1 if there are any."""
    source = (ROOT / "src/helexa/core/version.py").read_text()
    match = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)
    assert match is not None
    if lines := problems(sys.argv[1], match[1], (ROOT / "CHANGELOG.md").read_text()):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
