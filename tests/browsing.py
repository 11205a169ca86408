"""Chromium for tests of web pages, and the accessibility checker axe.

Chromium is that of the machine, else that of the npm package `@sparticuz/chromium`, with the libraries that it needs.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import packages
from nodejs import NODE

_UNPACK = """
const {pipeline} = require('stream/promises'), fs = require('fs'), zlib = require('zlib');
const [source, target] = process.argv.slice(1);
pipeline(fs.createReadStream(source), zlib.createBrotliDecompress(), fs.createWriteStream(target));
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    program, environment = shutil.which("chromium"), {}
    if program is None:
        folder = _packaged_chromium()
        program = str(folder / "chromium")
        environment = {
            "LD_LIBRARY_PATH": str(folder / "al2023" / "lib"),
            "FONTCONFIG_FILE": str(folder / "fonts" / "fonts.conf"),
            "LANG": "en_US.UTF-8",  # in the locale C, its language is the invalid en-US@posix
        }
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=program, args=["--no-sandbox"], env={**os.environ, **environment}
        )
        yield browser
        browser.close()


def _packaged_chromium() -> Path:
    """Return the cached folder with the program `chromium`, its libraries and fonts."""
    if platform.machine() != "x86_64":
        pytest.skip("no Chromium: install the package chromium; the npm package has none for this machine")
    compressed = packages.folder_from_npm(
        "@sparticuz/chromium@147.0.0",
        "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b",
        "bin/",
        "chromium-147.0.0.compressed",
    )
    folder = packages.CACHE / "chromium-147.0.0"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=packages.CACHE) as temporary:
            unpacked = Path(temporary, "chromium")
            unpacked.mkdir()
            for path in compressed.glob("*.br"):
                target = unpacked / path.stem
                subprocess.run([NODE, "-e", _UNPACK, path, target], check=True)
                if target.suffix == ".tar":
                    with packages.tar_file(target) as archive:
                        archive.extractall(target.with_suffix(""))
                    target.unlink()
            (unpacked / "chromium").chmod(0o755)
            (unpacked / "fonts" / "fonts.conf").write_text(f"<fontconfig><dir>{folder}/fonts</dir></fontconfig>")
            with suppress(OSError):  # another test process was faster
                unpacked.rename(folder)
    return folder


def axe() -> str:
    """Return the source of axe-core."""
    return packages.from_npm(
        "axe-core@4.14.1",
        "axe.min.js",
        "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
        "axe-core-4.14.1.min.js",
    ).read_text()


def violations(page: Page) -> list[str]:
    """Return the serious and critical findings of axe. The page must have evaluated `axe()` before."""
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    serious = [violation for violation in found if violation["impact"] in ("serious", "critical")]
    return [f"{violation['id']}: {node['html']}" for violation in serious for node in violation["nodes"]]


def collect_problems(page: Page) -> list[str]:
    """Return a list to which the page's console errors, warnings and exceptions are added as they happen."""
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    return problems
