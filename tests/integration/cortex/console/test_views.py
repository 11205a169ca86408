"""Every view in Chromium: size, accessibility, widths, themes, and use by keyboard alone."""

import ast
import json
import logging
import os
import re
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import expect

import browsing
from cortex.console.conftest import SignIn
from cortex.console.fake_fleet import ALICE, FakeFleet


@pytest.fixture(scope="module", autouse=True)
def some_requests(fleet: FakeFleet) -> None:
    for _ in range(3):
        fleet.ask()
    fleet.ask(model="unknown")


def test_sign_in_page_and_dialogs_pass_the_accessibility_checks_of_axe(sign_in: SignIn) -> None:
    page = sign_in(key=None)
    page.get_by_label("API key").wait_for()
    page.evaluate(browsing.axe())
    assert browsing.violations(page) == []
    page = sign_in()
    page.evaluate(browsing.axe())
    page.get_by_role("button", name="Load model…").click()
    page.get_by_label("Model", exact=True).fill("Org/New")
    page.get_by_text("would load").wait_for()
    assert browsing.violations(page) == []
    page.keyboard.press("Escape")
    page.evaluate("location.hash = '#/keys'")
    page.get_by_role("button", name="Create key…").click()
    assert browsing.violations(page) == []


def test_sign_in_with_an_unknown_key_shows_an_error_message(sign_in: SignIn) -> None:
    page = sign_in(None)
    page.get_by_label("API key").fill("hlx_unknown")
    page.get_by_role("button", name="Sign in").last.click()
    expect(page.get_by_role("alert")).to_contain_text("This gateway does not know this key.")
    expect(page.get_by_label("API key")).to_have_value("hlx_unknown")
    assert page.get_by_text("n1").count() == 0


def test_keyboard_shortcuts_open_views_and_focus_the_filter(sign_in: SignIn) -> None:
    page = sign_in()
    page.locator(".node").first.wait_for()
    page.keyboard.press("g")
    page.keyboard.press("3")
    expect(page.get_by_role("heading", name="Activity")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Filter requests")).to_be_focused()


def test_node_menu_and_dialog_work_by_keyboard(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in()
    button = page.get_by_role("button", name="Actions for n2", exact=True)
    button.focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("menuitem", name="Load model…")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Cordon a node").wait_for()
    page.keyboard.press("Escape")
    expect(button).to_be_focused()
    assert not fleet.call("GET", "/api/nodes")["nodes"][1]["cordoned"]


def test_activity_rows_open_by_keyboard(sign_in: SignIn) -> None:
    page = sign_in(view="activity")
    page.locator(".spacer .row").first.wait_for()
    page.get_by_role("grid", name="Requests").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Request")
    expect(dialog).to_contain_text("It was the only node with the model.")
    expect(dialog).to_contain_text("alice-1")


def test_activity_filter_keeps_only_matching_rows(sign_in: SignIn) -> None:
    page = sign_in(view="activity")
    page.locator(".spacer .row").nth(3).wait_for()
    page.get_by_label("Status").select_option("failed")
    expect(page.locator(".spacer .row")).to_have_count(1)
    page.get_by_label("Filter requests").fill("no such model")
    expect(page.get_by_text("Nothing matches")).to_be_visible()


def test_chosen_theme_survives_a_reload(sign_in: SignIn) -> None:
    page = sign_in(color_scheme="light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark


def test_account_that_is_no_admin_sees_only_its_own_data(sign_in: SignIn, fleet: FakeFleet) -> None:
    fleet.ask(key="bobs-key")
    page = sign_in(ALICE)
    page.get_by_role("heading", name="Models").wait_for()
    assert page.get_by_text("n1").count() == 0
    page.evaluate("location.hash = '#/keys'")
    page.get_by_text("alice-1").wait_for()
    assert page.get_by_text("bob").count() == page.get_by_text("ops-admin").count() == 0
    assert page.get_by_role("button", name="Create key…").count() == 0
    page.evaluate("location.hash = '#/activity'")
    page.locator(".spacer .row").first.wait_for()
    fleet.ask(key="bobs-key")
    fleet.ask(key=ALICE, model="Org/Eyes")
    page.locator(".spacer .row", has_text="Eyes").wait_for()
    assert page.get_by_text("bob").count() == 0
    page.evaluate("location.hash = '#/usage'")
    page.get_by_label("Group by").select_option("key_id")
    page.get_by_role("rowheader", name="alice-1").wait_for()
    assert page.get_by_text("bob").count() == 0


def test_usage_page_shows_costs_and_the_usage_of_the_last_24_hours(sign_in: SignIn) -> None:
    page = sign_in(view="usage")
    page.get_by_role("button", name="24 hours").click()
    page.get_by_text("per hour").wait_for()
    page.get_by_label("Show").select_option("Cost")
    row = page.get_by_role("row", name="Org/M")
    expect(row.get_by_role("cell").last).to_have_text(re.compile(r"^\$0\.0000\d+$"))
    chart = page.get_by_role("img", name="Cost per hour")
    chart.press("End")
    expect(page.locator(".read")).to_contain_text(re.compile(r"from \d\d:00: \$0\.0000\d+: Org/M"))


def test_fleet_page_draws_charts_of_the_last_hour(
    sign_in: SignIn, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.cortex.gateway.history, "_clock", lambda: time.time() + 60)  # completes the intervals
    page = sign_in()
    chart = page.get_by_role("img", name="Output tokens per second")
    chart.wait_for()
    assert not chart.get_attribute("aria-label").startswith("Output tokens per second, highest 0 ")  # type: ignore[union-attr]
    chart.press("ArrowLeft")
    expect(page.get_by_text(re.compile(r"^\d\d:\d\d: \d+(\.\d)? tok/s$")).first).to_be_attached()
    page.get_by_role("button", name="Per model").click()
    expect(page.locator(".trends .legend")).to_contain_text("Org/M")
    page.get_by_role("button", name="Last hour").click()
    page.reload()
    page.locator(".node").first.wait_for()
    assert chart.count() == 0


def test_log_page_shows_new_lines_and_filters_them(sign_in: SignIn) -> None:
    page = sign_in(view="log")
    log = logging.getLogger("helexa.cortex.test")
    log.warning("node n9 <b>is</b> gone")
    log.error("the disk is full")
    lines = page.locator(".log-lines li")
    expect(lines.filter(has_text="node n9 <b>is</b> gone")).to_have_count(1)
    page.get_by_label("Level").select_option("Errors only")
    expect(lines.filter(has_text="n9")).to_have_count(0)
    expect(lines.filter(has_text="the disk is full")).to_have_count(1)
    page.get_by_role("button", name="Pause").click()
    log.error("paused line")
    page.get_by_role("button", name="Continue (1 new)").click()
    page.get_by_label("Filter lines").fill("paused")
    expect(lines).to_have_count(1)


def test_log_page_is_not_offered_to_accounts_that_are_no_admin(sign_in: SignIn) -> None:
    page = sign_in(ALICE, view="log")
    page.get_by_text("The log is for administrators").wait_for()
    assert page.get_by_role("link", name="Log", exact=True).count() == 0


def test_connect_page_shows_client_settings_for_the_chosen_model(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in(view="connect", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_label("Model", exact=True).select_option("small")
    page.get_by_role("button", name="Codex").click()
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_text("Copied").first.wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert 'model = "small"' in copied and f'base_url = "{fleet.url}/v1"' in copied
    assert "model_context_window = 8192" in copied


@pytest.mark.parametrize(
    "id", ["a'; touch x; '", "$(touch x)`touch x`", 'a"; open("x", "w") #\\', "=a b: {c} \U0001f600"]
)
def test_snippets_of_the_connect_page_quote_hostile_model_ids(
    sign_in: SignIn, fleet: FakeFleet, tmp_path: Path, id: str
) -> None:
    """A node chooses its model ids, and users copy the texts into a shell, a program or a file."""
    node = fleet.nodes["n1"]
    node.holds(id, tool_call=True)
    fleet.until(lambda: id in fleet.cortex.gateway.fleet.node("n1").models)
    try:
        page = sign_in(view="connect")
        page.get_by_label("Model", exact=True).select_option(id)
        seen = {"Python": 0, "shell": 0, "toml": 0, "json": 0, "yaml": 0}
        for button in page.get_by_label("Clients").get_by_role("button").all():
            button.click()
            for block in page.locator("section .code").all():
                title = block.locator(".code-head span").first.inner_text()
                text = block.locator("code").inner_text()
                kind = title if title in seen else title.rpartition(".")[2]
                seen[kind] = seen.get(kind, 0) + _names(kind, text, id, tmp_path)
    finally:
        node.models = [model for model in node.models if model["id"] != id]
    assert seen == {"Python": 3, "shell": 4, "toml": 1, "json": 3, "yaml": 1, "environment": 0}
    assert not (tmp_path / "x").exists()


def _names(kind: str, text: str, id: str, folder: Path) -> bool:
    """Whether a text of the view names a model. The model must have the id `id`, and the text must be valid."""
    match kind:
        case "Python":
            constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
            assert id in constants
            return True
        case "shell" | "environment":
            stubs = "".join(f"{name}() {{ env; printf '%s\\n' \"$@\"; }}\n" for name in _PROGRAMS)
            options = {"cwd": folder, "env": {"PATH": os.environ["PATH"]}}
            done = subprocess.run(["bash", "-c", stubs + text], **options, capture_output=True, text=True, check=True)
            return id in done.stdout or json.dumps(id, ensure_ascii=False) in done.stdout
        case "toml":
            return tomllib.loads(text)["model"] == id
        case "json":
            json.loads(text)
            assert json.dumps(id, ensure_ascii=False)[1:] in text
            return True
        case _:
            return yaml.safe_load(text)["models"][0]["model"] == id


_PROGRAMS = ("claude", "codex", "pi", "aider", "curl", "docker")
