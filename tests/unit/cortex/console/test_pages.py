"""The console's page and files: content negotiation, headers, and vendored files."""

import base64
import hashlib
import re
import tomllib
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.cortex.console.sign_in_sessions_and_page import ASSETS, PATH

STATIC = resources.files("helexa.cortex.console") / "static"
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture
async def disabled(node: FakeNode) -> AsyncIterator[Cortex]:
    async with running_cortex(node, settings={"console": {"enabled": False}}) as cortex:
        yield cortex


async def test_root_path_is_html_for_browsers_and_json_for_other_clients(cortex: Cortex) -> None:
    async with cortex.client.get(cortex.url, headers=HTML) as response:
        assert response.content_type == "text/html"
    for headers in ({}, {"accept": "application/json"}, {"accept": "*/*"}):
        async with cortex.client.get(cortex.url, headers=headers) as response:
            assert (await response.json())["status"] == "ok"


async def test_disabled_console_serves_json_at_the_root_path_and_no_files(disabled: Cortex) -> None:
    async with disabled.client.get(disabled.url, headers=HTML) as response:
        assert (await response.json())["status"] == "ok"
    async with disabled.client.get(f"{disabled.url}{PATH}/{ASSETS.digest}/main.js") as response:
        assert response.status == 404


async def test_content_security_policy_allows_only_own_scripts_and_the_import_map(cortex: Cortex) -> None:
    async with cortex.client.get(cortex.url, headers=HTML) as response:
        page, policy = await response.text(), response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    [inline] = re.findall(r"<script(?![^>]*src=)[^>]*>(.+?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert not re.search(r"\son\w+=|style=", page)
    assert re.findall(r"https?://", page) == []


async def test_console_files_are_served_as_immutable_only_under_their_content_hash(cortex: Cortex) -> None:
    async with cortex.client.get(f"{cortex.url}{PATH}/{ASSETS.digest}/main.js") as response:
        assert response.status == 200 and "immutable" in response.headers["cache-control"]
        assert response.content_type == "text/javascript"
    async with cortex.client.get(f"{cortex.url}{PATH}/old/main.js") as response:
        assert response.status == 200 and response.headers["cache-control"] == "no-store"
    for name in ("index.html", "../pages.py", "%2e%2e/pages.py", "vendor", "none.js"):
        async with cortex.client.get(f"{cortex.url}{PATH}/{ASSETS.digest}/{name}") as response:
            assert response.status == 404


async def test_every_file_that_the_console_page_names_exists(cortex: Cortex) -> None:
    async with cortex.client.get(cortex.url, headers=HTML) as response:
        page = await response.text()
    names = re.findall(rf"{PATH}/{ASSETS.digest}/([\w./-]+)", page)
    assert {"main.js", "console.css", "base.css", "theme.js"} <= {*names} <= {*ASSETS.files}


def test_console_scripts_import_only_files_that_exist() -> None:
    for name, content in ASSETS.files.items():
        if name.endswith(".js") and "/" not in name:
            for imported in re.findall(r"(?:from|import|import\()\s*\"\./([\w./]+)\"", content.decode()):
                assert imported in ASSETS.files, (name, imported)


def test_vendored_console_files_match_their_hashes() -> None:
    folder = Path(str(STATIC / "vendor"))
    packages = tomllib.loads((folder / "vendor.toml").read_text())["package"]
    listed = {name: file["sha256"] for package in packages for name, file in package["files"].items()}
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files - {"vendor.toml"} == {*listed}
    for name, sha256 in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256


def test_client_settings_shown_by_the_console_are_documented() -> None:
    """Every variable and setting that the view `connect` shows is explained in docs/clients.md."""
    script = (STATIC / "connect.js").read_text()
    documented = (DOCS / "clients.md").read_text()
    variables = {*re.findall(r"\b([A-Z]+(?:_[A-Z]+)+)=", script)} - {"YOUR_KEY"}
    settings = {*re.findall(r"\\n([a-z_]+) = ", script)}
    assert len(variables) > 8 and len(settings) > 4
    assert {name for name in variables | settings if name not in documented} == set()
