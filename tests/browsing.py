"""Chromium for tests of web pages, and the accessibility checker axe."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

import packages


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


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
