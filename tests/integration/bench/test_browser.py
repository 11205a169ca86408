"""The pages in a real browser: charts, page size, keyboard use and accessibility."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

import browsing
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
def browser() -> Iterator[Browser]:
    with browsing.chromium() as browser:
        yield browser


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


def open_page(browser: Browser, address: str, **options) -> tuple[Page, list[str], list[int]]:
    """Open a page; return it, a list that collects console errors, and the size of each response in bytes."""
    page = browser.new_context(bypass_csp=False, **options).new_page()
    problems = browsing.collect_problems(page)
    sizes: list[int] = []
    page.on("response", lambda response: sizes.append(len(response.body())))
    page.goto(address, wait_until="load")
    return page, problems, sizes


@pytest.mark.parametrize("name", PATHS)
def test_pages_draw_charts_stay_small_and_pass_axe(browser, url, run_with_requests, name):
    """Check the page in a narrow window with the light theme, then in a wide window with the dark theme."""
    address = url + PATHS[name].format(run=run_with_requests)
    page, problems, sizes = open_page(
        browser, address, viewport={"width": 375, "height": 812}, color_scheme="light", reduced_motion="reduce"
    )
    assert sum(sizes) < MOST_BYTES
    page.evaluate(browsing.axe())
    assert page_problems(page, 375) == []
    page.set_viewport_size({"width": 1440, "height": 812})
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    assert page_problems(page, 1440) == []
    assert problems == []
    page.context.close()


def page_problems(page: Page, width: int) -> list[str]:
    """Return accessibility violations, a width above `width` pixels, and charts that are not drawn."""
    problems = browsing.violations(page)
    if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
        problems.append(f"{needed} pixels wide")
    charts = page.locator("figure.chart")
    return problems if charts.locator("canvas").count() == charts.count() else [*problems, "a chart is not drawn"]


def test_choice_of_a_metric_changes_the_url_and_the_chart(browser, url):
    page, problems, _ = open_page(browser, url + TRENDS)
    page.get_by_label("Metric").select_option("ttft_s")
    page.wait_for_url("**metric=ttft_s**")
    page.wait_for_selector("figure.chart canvas")
    assert "TTFT" in page.locator(".legend").first.inner_text()
    page.go_back()
    page.wait_for_url(f"**{TRENDS[:7]}**output_tps_user**")
    assert problems == []
    page.context.close()


def test_compare_page_compares_the_two_chosen_builds(browser, url):
    page, problems, _ = open_page(browser, f"{url}/compare")
    build = f"{fleet_history.build(0).sha}@beast"
    page.get_by_label("A, for example the earlier build").select_option(build)
    page.wait_for_url("**a=**")
    page.locator(".head code").first.get_by_text(build).wait_for()
    assert page.locator("tbody tr").count() > 2
    assert problems == []
    page.context.close()


def test_keyboard_moves_through_chart_points_and_between_pages(browser, url):
    page, problems, _ = open_page(browser, url + TRENDS, color_scheme="dark")
    page.locator(".plot").focus()
    page.keyboard.press("Home")
    assert fleet_history.build(0).sha in page.locator(".read").inner_text()
    page.keyboard.press("ArrowRight")
    assert fleet_history.build(1).sha in page.locator(".read").inner_text()
    page.keyboard.press("g")
    page.keyboard.press("3")
    page.wait_for_url("**/runs")
    assert problems == []
    page.context.close()


def test_chosen_theme_survives_reload(browser, url):
    page, _, _ = open_page(browser, url, color_scheme="light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.context.close()


def test_tables_and_filters_work_without_javascript(browser, url):
    page, problems, _ = open_page(browser, url + TRENDS, java_script_enabled=False)
    assert page.locator("tbody tr").count() > 40
    page.get_by_label("Scenario").select_option("concurrency:8")
    page.get_by_role("button", name="Show").click()
    assert "concurrency%3A8" in page.url or "concurrency:8" in page.url
    assert page.locator("tbody tr").count() > 40
    assert problems == []
    page.context.close()


def test_tables_in_a_narrow_window_show_the_columns_that_fit_and_a_column_chooser(browser, url):
    page, problems, _ = open_page(browser, f"{url}/runs", viewport={"width": 375, "height": 812})
    table, chooser = page.locator(".scroll table"), page.locator(".columns")
    fits = "(one) => one.parentElement.scrollWidth <= one.parentElement.clientWidth"
    assert table.evaluate(fits)
    assert not page.get_by_role("columnheader", name="Build").is_visible()
    chooser.locator("summary").click()
    chooser.get_by_label("Build", exact=True).check()
    assert page.get_by_role("columnheader", name="Build").is_visible()
    page.locator("select[name=scenario]").select_option(index=1)
    page.wait_for_url("**scenario=**")
    page.get_by_role("columnheader", name="Build").wait_for()
    page.set_viewport_size({"width": 1440, "height": 812})
    chooser.wait_for(state="detached")
    assert problems == []
    page.context.close()
