"""Every view in Chromium: size, accessibility, widths, themes, and use by keyboard alone."""

import pytest
from playwright.sync_api import expect

import browsing
from cortex.console.conftest import SignIn
from cortex.console.fake_fleet import ALICE, FakeFleet

VIEWS = ("fleet", "playground", "activity", "keys", "usage", "connect")
MOST_BYTES = 300_000


@pytest.fixture(scope="module", autouse=True)
def some_requests(fleet: FakeFleet) -> None:
    for _ in range(3):
        fleet.ask()
    fleet.ask(model="unknown")


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_small_fit_all_widths_in_both_themes_and_pass_axe(sign_in: SignIn, view: str) -> None:
    sizes: list[int] = []
    page = sign_in(view=view, sizes=sizes, viewport={"width": 1440, "height": 900}, color_scheme="light")
    page.locator(f"main.view-{view} h1").wait_for()
    page.wait_for_load_state()
    assert 50_000 < sum(sizes) < MOST_BYTES
    page.evaluate(browsing.axe())
    for width, theme in ((1440, "light"), (768, "dark"), (375, "light"), (375, "dark")):
        page.set_viewport_size({"width": width, "height": 812})
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        assert browsing.violations(page) == [], (width, theme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_sign_in_page_and_dialogs_pass_axe(sign_in: SignIn) -> None:
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


def test_unknown_key_is_reported_in_words(sign_in: SignIn) -> None:
    page = sign_in(None)
    page.get_by_label("API key").fill("hlx_unknown")
    page.get_by_role("button", name="Sign in").last.click()
    expect(page.get_by_role("alert")).to_contain_text("This gateway does not know this key.")
    expect(page.get_by_label("API key")).to_have_value("hlx_unknown")
    assert page.get_by_text("n1").count() == 0


def test_keys_open_views_and_focus_the_filter(sign_in: SignIn) -> None:
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


def test_account_sees_only_its_own_data(sign_in: SignIn, fleet: FakeFleet) -> None:
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


def test_connect_shows_the_settings_of_the_chosen_model(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in(view="connect", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_label("Model", exact=True).select_option("small")
    page.get_by_role("button", name="Codex").click()
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_text("Copied").first.wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert 'model = "small"' in copied and f'base_url = "{fleet.url}/v1"' in copied
    assert "model_context_window = 8192" in copied
