"""Fixtures: a gateway that requires keys, a node with a real model, and a browser."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

import browsing
from clients.stack import TIMEOUT_SECONDS, Stack
from faults import bad_models

ADMIN, ALICE = "the-admin-key", "alices-key"
SECOND, BROKEN = "org/second", "org/broken"
KEYS = f"""
[entitlements]
require_auth = true
[[entitlements.keys]]
key = "{ADMIN}"
account_id = "ops"
role = "admin"
[[entitlements.keys]]
key = "{ALICE}"
account_id = "alice"
hard_cap = 100000
"""

SignIn = Callable[..., Page]


@pytest.fixture(scope="session")
def stack(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("console")
    half = bad_models.truncated(smollm2_gguf, folder / "half.gguf")
    catalog = f'[[models]]\nid = "{SECOND}"\nsource = "file:{smollm2_gguf}"\n'
    catalog += f'[[models]]\nid = "{BROKEN}"\nsource = "file:{half}"\n'
    with Stack(smollm2_gguf, folder, catalog=catalog, gateway_config=KEYS, key=ADMIN) as stack:
        yield stack


@pytest.fixture(scope="module")  # while it runs, asynchronous tests cannot run in this process
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT_SECONDS * 1000)
    with browsing.chromium() as browser:
        yield browser


@pytest.fixture
def sign_in(stack: Stack, browser: Browser) -> Iterator[SignIn]:
    """Function that signs in to the console in a new context and opens a view. A failing script fails the test."""
    opened: list[tuple[Page, list[str]]] = []

    def sign_in(key: str = ADMIN, view: str = "fleet") -> Page:
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], accept_downloads=True)
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        page = context.new_page()
        opened.append((page, browsing.collect_problems(page)))
        page.goto(f"{stack.url}/#/{view}")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").last.click()
        page.get_by_role("button", name="Sign out").wait_for()
        return page

    yield sign_in
    for page, _ in opened:
        page.context.close()
    assert [problem for _, found in opened for problem in found if "Failed to load resource" not in problem] == []
