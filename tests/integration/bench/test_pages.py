"""The pages' HTML, without a browser."""

import hashlib
import re
import sqlite3
import tomllib
import urllib.error
import urllib.request
from contextlib import closing
from html.parser import HTMLParser
from importlib import resources

import pytest

from helexa.bench.app import SECURITY
from helexa.bench.pages import formatting
from helexa.bench.pages.page_routes_and_html_export import PAGES, export, live_link
from helexa.bench.pages.page_routes_and_html_export import html as render_page
from helexa.bench.results import capacity_and_scaling, series
from helexa.bench.results.archive import Archive
from helexa.bench.store.writer import Store

STATIC = resources.files("helexa.bench.pages").joinpath("static")
CHOICE = "?target=beast&model=Qwen/Qwen3-8B"
PATHS = [
    "/",
    "/?target=closet",
    "/trends",
    f"/trends{CHOICE}&scenario=concurrency:8&metric=ttft_s&x=time",
    "/runs",
    "/runs?ok=false",
    "/runs/1",
    "/compare",
    "/compare?a=@beast&b=@closet&metric=tpot_s",
    f"/capacity{CHOICE}",
    f"/context{CHOICE}",
    "/swap",
    "/quality",
    "/alerts",
    "/method",
]
VOID = {"meta", "link", "input", "br", "line", "circle", "rect", "path"}


class Page(HTMLParser):
    """Text, links and table rows of a page. Fails if tags are not balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.rows = 0
        self.text = ""
        self.labels = 0
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes), attributes
        if tag not in VOID:
            self._open.append(tag)
        if tag == "a":
            self.links.append(attributes["href"])
        self.rows += tag == "tr"
        self.labels += tag == "label"

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data


def get(url: str) -> tuple[dict[str, str], str]:
    with urllib.request.urlopen(url, timeout=60) as response:
        return dict(response.headers), response.read().decode()


@pytest.mark.parametrize("path", PATHS)
def test_pages_are_html_documents_below_300_kb_with_security_headers(site, path):
    headers, html = get(site + path)
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert {name: headers[name] for name in SECURITY} == SECURITY
    assert len(html) < 300_000
    page = Page(html)
    assert page.rows > 1 or path == "/method"


def test_every_link_of_every_page_leads_to_an_existing_page(site):
    links = {link for path in PATHS for link in Page(get(site + path)[1]).links if link.startswith("/")}
    names = {re.sub(r"[?].*", "", link) for link in links}
    assert {page.path for page in PAGES.values() if page.in_menu} <= names
    counts: dict[str, int] = {}
    for link in sorted(links):
        name = re.sub(r"\d+|[?].*", "", link)
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= 4:
            get(site + link)


def test_tables_of_the_pages_show_the_results_of_the_analysis_functions(site, archive):
    trend = series.series(archive, "beast", "Qwen/Qwen3-8B", "single:cold:4096", "output_tps_user")
    text = Page(get(f"{site}/trends{CHOICE}&scenario=single:cold:4096&metric=output_tps_user")[1]).text
    for point in trend.points:
        assert point.sha in text
        assert formatting.measured(point.p50, trend.metric) in text
    text = Page(get(f"{site}/capacity{CHOICE}")[1]).text
    for curve in capacity_and_scaling.capacity(archive, target="beast", model="Qwen/Qwen3-8B"):
        for point in curve.points:
            assert formatting.number(point.output_tps) in text
    text = Page(get(f"{site}/context{CHOICE}")[1]).text
    for ladder in capacity_and_scaling.scaling(archive, target="beast", model="Qwen/Qwen3-8B"):
        for step in ladder.points:
            assert formatting.number(step.prefill_tps) in text


def test_compare_page_lists_the_builds_of_each_target_and_has_a_link_that_swaps_the_sides(site, archive):
    html = get(f"{site}/compare")[1]
    a, b = re.findall(r'<option value="([^"]+)" selected>', html)[:2]
    assert {target for _, target in (value.split("@") for value in (a, b))} <= {"beast", "closet", "gateway"}
    groups = re.findall(r'<optgroup label="([^"]+)">', html)
    assert {"Builds on beast", "Builds on closet", "Targets"} <= {*groups}
    assert html.count('<option value="@beast"') == 2
    swapped = get(site + next(link for link in Page(html).links if link.startswith("/compare?a=")))[1]
    assert re.findall(r'<option value="([^"]+)" selected>', swapped)[:2] == [b, a]
    unknown = get(f"{site}/compare?a=@beast&b=0123456@beast")[1]
    assert '<option value="0123456@beast" selected>' in unknown and "no build is called" in unknown


def test_pages_mark_estimated_values(site):
    assert "estimated" in Page(get(f"{site}/?target=gateway")[1]).text
    assert "estimated" not in Page(get(f"{site}/?target=beast")[1]).text


def test_error_responses_for_browsers_are_html_pages(site):
    for path, status in (("/runs/999999999", 404), ("/trends?metric=nonsense", 400), ("/nowhere", 404)):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(site + path)
        with error.value as response:
            assert response.code == status
            assert response.headers["content-security-policy"]
            assert 'role="alert"' in response.read().decode()


def test_names_of_targets_and_models_are_escaped_in_html(tmp_path, past, serving):
    path = tmp_path / "hostile.sqlite"
    path.write_bytes(past.read_bytes())
    hostile = "</script><img src=x onerror=alert(1)>"
    with Store(path) as store, store.transaction() as connection:
        connection.execute("UPDATE model SET name = ? WHERE name = 'Qwen/Qwen3-8B'", (hostile,))
        connection.execute("UPDATE scenario SET name = ? WHERE name = 'concurrency:2'", (hostile,))
        connection.execute("UPDATE run SET artifact = ? WHERE artifact IS NOT NULL", (hostile,))
        connection.execute("UPDATE build SET sha = ? WHERE id = 1", (hostile,))
    with serving(path) as url:
        for page in ("/", "/trends?scenario=swap", "/runs", "/quality", "/compare", "/capacity", "/context", "/swap"):
            html = get(url + page)[1]
            assert "<img" not in html
            Page(html)


def test_links_keep_the_proxy_path_prefix(past, serving):
    with serving(past, "/bench/") as url:
        page = Page(get(f"{url}/")[1])
    assert page.links
    assert all(link.startswith("/bench/") for link in page.links if not link.startswith("#"))


def test_trends_page_with_one_build_says_that_a_trend_needs_a_second_build(past, tmp_path):
    with closing(sqlite3.connect(past)) as source, closing(sqlite3.connect(tmp_path / "one.sqlite")) as copy:
        source.backup(copy)
        with copy:
            copy.execute("DELETE FROM run WHERE build_id <> (SELECT MIN(build_id) FROM run)")
    with Archive(tmp_path / "one.sqlite") as archive:
        page = PAGES["trends"]
        query = {name: parameter.default for name, parameter in page.parameters.items()}
        text = render_page(archive, page, query, live_link(""), lambda name: name)
    assert "One build only: a trend begins with the second build." in text


def test_pages_link_to_the_console_if_configured(archive):
    page = PAGES["method"]
    for console, count in ((None, 0), ("https://gateway.example", 1)):
        text = render_page(archive, page, {}, live_link(""), lambda name: name, console=console)
        assert text.count('href="https://gateway.example"') == count


def test_vendored_javascript_files_match_their_hashes():
    listed = tomllib.loads(STATIC.joinpath("vendor/vendor.toml").read_text())["package"]
    files = {name: entry["sha256"] for package in listed for name, entry in package["files"].items()}
    names = {file.name for file in STATIC.joinpath("vendor").iterdir()} - {"vendor.toml"}
    assert names == files.keys()
    for name, sha256 in files.items():
        assert hashlib.sha256(STATIC.joinpath("vendor", name).read_bytes()).hexdigest() == sha256
    for package in listed:
        assert any(name.endswith("LICENSE") for name in package["files"])


def test_exported_html_page_needs_no_server(past, tmp_path):
    database = tmp_path / "one.sqlite"
    database.write_bytes(past.read_bytes())
    with Store(database) as store, store.transaction() as connection:
        connection.execute("DELETE FROM run WHERE target_id > 1 OR model_id > 1")
    with Archive(database) as archive:
        count = export(archive, tmp_path)
    files = {path.name: path.read_text() for path in tmp_path.glob("*.html")}
    assert len(files) == count > 19
    for html in files.values():
        for link in Page(html).links:
            assert link.startswith(("#", "http")) or link in files, link
        assert "<form" not in html
    assert all((tmp_path / name).exists() for name in re.findall(r'(?:src|href)="(static/[^"]+)"', files["index.html"]))


@pytest.mark.parametrize(
    "value, shown",
    [(None, "–"), (0, "0 ms"), (0.0000123, "12.3 µs"), (0.0123, "12.3 ms"), (1.5, "1.50 s"), (12.34, "12.3 s")],
)
def test_durations_are_shown_in_seconds_milliseconds_or_microseconds(value, shown):
    assert formatting.seconds(value) == shown


def test_changes_are_shown_in_percent_with_a_sign():
    assert [formatting.change(ratio) for ratio in (1.081, 0.9, 1.0)] == ["+8.1 %", "−10.0 %", "+0.0 %"]
