"""The pages as HTML, without a browser."""

import hashlib
import re
import tomllib
import urllib.error
import urllib.request
from html.parser import HTMLParser
from importlib import resources

import pytest

from helexa.bench.app import SECURITY
from helexa.bench.export import export
from helexa.bench.pages import words
from helexa.bench.pages.site import PAGES
from helexa.bench.results import capacity, scaling, series
from helexa.bench.results.archive import Archive
from helexa.bench.store.store import Store

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
    """Text, links and table rows of a page; fails where tags do not match."""

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
        given = dict(attrs)
        assert "style" not in given and not any(name.startswith("on") for name in given), given
        if tag not in VOID:
            self._open.append(tag)
        if tag == "a":
            self.links.append(given["href"])
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
    with urllib.request.urlopen(url, timeout=60) as answer:
        return dict(answer.headers), answer.read().decode()


@pytest.mark.parametrize("path", PATHS)
def test_pages_are_sound_small_and_guarded(site, path):
    headers, html = get(site + path)
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert {name: headers[name] for name in SECURITY} == SECURITY
    assert len(html) < 300_000
    page = Page(html)
    assert page.rows > 1 or path == "/method"


def test_every_link_of_every_page_leads_somewhere(site):
    links = {link for path in PATHS for link in Page(get(site + path)[1]).links if link.startswith("/")}
    names = {re.sub(r"[?].*", "", link) for link in links}
    assert {page.path for page in PAGES.values() if page.in_menu} <= names
    seen: dict[str, int] = {}
    for link in sorted(links):
        name = re.sub(r"\d+|[?].*", "", link)
        seen[name] = seen.get(name, 0) + 1
        if seen[name] <= 4:
            get(site + link)


def test_tables_hold_what_the_api_says(site, archive):
    found = series.series(archive, "beast", "Qwen/Qwen3-8B", "single:cold:4096", "output_tps_user")
    text = Page(get(f"{site}/trends{CHOICE}&scenario=single:cold:4096&metric=output_tps_user")[1]).text
    for point in found.points:
        assert point.sha in text
        assert words.measured(point.p50, found.metric) in text
    text = Page(get(f"{site}/capacity{CHOICE}")[1]).text
    for one in capacity.capacity(archive, target="beast", model="Qwen/Qwen3-8B"):
        for point in one.points:
            assert words.number(point.output_tps) in text
    text = Page(get(f"{site}/context{CHOICE}")[1]).text
    for ladder in scaling.scaling(archive, target="beast", model="Qwen/Qwen3-8B"):
        for step in ladder.points:
            assert words.number(step.prefill_tps) in text


def test_what_is_estimated_is_marked(site):
    assert "estimated" in Page(get(f"{site}/?target=gateway")[1]).text
    assert "estimated" not in Page(get(f"{site}/?target=beast")[1]).text


def test_unknown_things_are_said_on_a_page(site):
    for path, status in (("/runs/999999999", 404), ("/trends?metric=nonsense", 400), ("/nowhere", 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(site + path)
        with caught.value as answer:
            assert answer.code == status
            assert answer.headers["content-security-policy"]
            assert 'role="alert"' in answer.read().decode()


def test_names_are_only_text(tmp_path, past, serving):
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


def test_links_keep_the_path_of_a_proxy(past, serving):
    with serving(past, "/bench/") as url:
        page = Page(get(f"{url}/")[1])
    assert page.links
    assert all(link.startswith("/bench/") for link in page.links if not link.startswith("#"))


def test_vendored_files_are_what_they_were():
    listed = tomllib.loads(STATIC.joinpath("vendor/vendor.toml").read_text())["package"]
    files = {name: entry["sha256"] for package in listed for name, entry in package["files"].items()}
    held = {file.name for file in STATIC.joinpath("vendor").iterdir()} - {"vendor.toml"}
    assert held == files.keys()
    for name, sha256 in files.items():
        assert hashlib.sha256(STATIC.joinpath("vendor", name).read_bytes()).hexdigest() == sha256
    for package in listed:
        assert any(name.endswith("LICENSE") for name in package["files"])


def test_an_export_stands_by_itself(past, tmp_path):
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
def test_durations_have_the_unit_that_suits_them(value, shown):
    assert words.seconds(value) == shown


def test_changes_have_a_sign():
    assert [words.change(ratio) for ratio in (1.081, 0.9, 1.0)] == ["+8.1 %", "−10.0 %", "+0.0 %"]
