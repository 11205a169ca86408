"""The pages in a real browser: drawn, small, usable by keys, and without faults that keep people out."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import packages
from bench import fleet_history

CHOICE = "?target=beast&model=Qwen/Qwen3-8B"
TRENDS = f"/trends{CHOICE}&scenario=single:cold:4096&metric=output_tps_user"
PATHS = {
    "overview": "/",
    "trends": f"{TRENDS}&baseline={fleet_history.build(0).sha}",
    "runs": "/runs",
    "run": "/runs/{run}",
    "compare": "/compare",
    "capacity": f"/capacity{CHOICE}",
    "context": f"/context{CHOICE}",
    "swap": "/swap",
    "quality": "/quality",
    "alerts": "/alerts",
    "method": "/method",
}
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def axe() -> str:
    return packages.from_npm(
        "axe-core@4.14.1",
        "axe.min.js",
        "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
        "axe-core-4.14.1.min.js",
    ).read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "bench.sqlite"
    fleet_history.write(path, 50_000)
    fleet_history.add_alert(path)
    return path


@pytest.fixture(scope="module")
def url(big: Path, serving) -> Iterator[str]:
    with serving(big) as address:
        yield address


@pytest.fixture(scope="module")
def run_with_requests(big: Path) -> int:
    return fleet_history.run_with_requests(big)


def opened(browser: Browser, address: str, **options) -> tuple[Page, list[str], list[int]]:
    """A page, what it complained of, and how many bytes came for it."""
    page = browser.new_context(bypass_csp=False, **options).new_page()
    said: list[str] = []
    weights: list[int] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda response: weights.append(len(response.body())))
    page.goto(address, wait_until="load")
    return page, said, weights


@pytest.mark.parametrize("name", PATHS)
def test_pages_are_drawn_small_and_open_to_all(browser, url, axe, run_with_requests, name):
    """On a phone by day; then the window grows, and night falls."""
    address = url + PATHS[name].format(run=run_with_requests)
    page, said, weights = opened(
        browser, address, viewport={"width": 375, "height": 812}, color_scheme="light", reduced_motion="reduce"
    )
    assert sum(weights) < MOST_BYTES
    page.evaluate(axe)
    assert faults(page, 375) == []
    page.set_viewport_size({"width": 1440, "height": 812})
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    assert faults(page, 1440) == []
    assert said == []
    page.context.close()


def faults(page: Page, width: int) -> list[str]:
    """What keeps people out of a page, is wider than the window, or was not drawn."""
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    said = [f"{one['id']}: {one['nodes'][0]['html']}" for one in serious]
    if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
        said.append(f"{needed} pixels wide")
    charts = page.locator("figure.chart")
    return said if charts.locator("canvas").count() == charts.count() else [*said, "a chart is not drawn"]


def test_a_filter_changes_the_address_and_the_chart(browser, url):
    page, said, _ = opened(browser, url + TRENDS)
    page.get_by_label("Metric").select_option("ttft_s")
    page.wait_for_url("**metric=ttft_s**")
    page.wait_for_selector("figure.chart canvas")
    assert "TTFT" in page.locator(".legend").first.inner_text()
    page.go_back()
    page.wait_for_url(f"**{TRENDS[:7]}**output_tps_user**")
    assert said == []
    page.context.close()


def test_charts_and_pages_are_reached_by_keys(browser, url):
    page, said, _ = opened(browser, url + TRENDS, color_scheme="dark")
    page.locator(".plot").focus()
    page.keyboard.press("Home")
    assert fleet_history.build(0).sha in page.locator(".read").inner_text()
    page.keyboard.press("ArrowRight")
    assert fleet_history.build(1).sha in page.locator(".read").inner_text()
    page.keyboard.press("g")
    page.keyboard.press("3")
    page.wait_for_url("**/runs")
    assert said == []
    page.context.close()


def test_a_theme_that_is_chosen_stays(browser, url):
    page, _, _ = opened(browser, url, color_scheme="light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.context.close()


def test_without_javascript_tables_and_filters_work(browser, url):
    page, said, _ = opened(browser, url + TRENDS, java_script_enabled=False)
    assert page.locator("tbody tr").count() > 40
    page.get_by_label("Scenario").select_option("concurrency:8")
    page.get_by_role("button", name="Show").click()
    assert "concurrency%3A8" in page.url or "concurrency:8" in page.url
    assert page.locator("tbody tr").count() > 40
    assert said == []
    page.context.close()
