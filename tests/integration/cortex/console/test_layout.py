"""The layout of every view in Chromium: several widths and two themes, with long names and many rows."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

import browsing
from cortex.console.conftest import SignIn
from cortex.console.crowded_fleet import COLD, LONG_MODEL, LONG_NODE, UNBROKEN, crowded_fleet
from cortex.console.fake_fleet import FakeFleet
from nightly import NIGHTLY

MOST_BYTES = 300_000
VIEWS = ("fleet", "playground", "activity", "keys", "usage", "connect", "log")
WIDTHS = {375: "light", 768: "dark", 1240: None}
"""The widths, and the theme in which axe checks the page: the rules see no difference between the other pairs."""
if NIGHTLY:
    WIDTHS |= {640: None, 900: None, 1440: "light"}

FAULTS = """async () => {
  const frame = () => new Promise(requestAnimationFrame);
  for (let count = 0; count < 3; count++) await frame();  // scripts of the page follow the new width
  const faults = new Set(), width = innerWidth;
  const root = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document.body;
  const shown = (element) =>
    element.checkVisibility({visibilityProperty: true}) && !element.closest(".unseen, .skip, .stack thead, svg");
  const name = (element) => {
    const text = element.getAttribute("aria-label") ?? element.innerText ?? "";
    return `${element.tagName.toLowerCase()}.${element.className} "${text.trim().slice(0, 60)}"`;
  };
  if (document.documentElement.scrollWidth > width)
    faults.add(`the page is ${document.documentElement.scrollWidth - width} px too wide`);
  for (const element of root.querySelectorAll("*")) {
    if (element.scrollWidth <= element.clientWidth + 1 || element.clientWidth === 0 || !shown(element)) continue;
    const {overflowX, textOverflow} = getComputedStyle(element);
    if (overflowX === "visible") faults.add(`${name(element)} is too narrow`);
    if (overflowX === "visible" || element.matches("pre, input, textarea, select, .markdown *")) continue;
    const isNamed = textOverflow === "ellipsis" && element.closest("[title], [role=row]");
    if (!isNamed) faults.add(`${name(element)} ${overflowX === "hidden" ? "is cut" : "scrolls sideways"}`);
  }
  for (const action of root.querySelectorAll("a[href], button, input, select, textarea, summary, [role=menuitem]")) {
    if (!shown(action)) continue;
    action.scrollIntoView({block: "center", inline: "nearest"});
    const box = action.getBoundingClientRect();
    if (box.left < 0 || box.right > width) faults.add(`${name(action)} is outside of the window`);
    for (let parent = action.parentElement; parent; parent = parent.parentElement) {
      const outer = parent.getBoundingClientRect();
      const isInside = box.left >= outer.left - 1 && box.right <= outer.right + 1;
      if (getComputedStyle(parent).overflowX !== "visible" && !isInside)
        faults.add(`${name(action)} is cut by ${name(parent)}`);
    }
    const hit = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
    if (!hit || !(action.contains(hit) || hit.contains(action)))
      faults.add(`${name(action)} is covered by ${hit ? name(hit) : "nothing"}`);
  }
  return [...faults];
}"""


@pytest.fixture(scope="module")
def crowded() -> Iterator[FakeFleet]:
    with crowded_fleet() as fleet:
        yield fleet


def faults(page: Page) -> dict[str, list[str]]:
    """Return what is wrong with a page or its open dialog, by width and theme."""
    found: dict[str, list[str]] = {}
    page.evaluate(browsing.axe())
    for width, theme in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 812})
        found[f"layout {width}"] = page.evaluate(FAULTS)
        if theme is not None:
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            found[f"axe {width} {theme}"] = browsing.violations(page)
    return {place: problems for place, problems in found.items() if problems}


@pytest.mark.parametrize("view", VIEWS)
def test_each_console_view_loads_few_bytes_and_neither_clips_nor_covers_content(
    sign_in: SignIn, crowded: FakeFleet, view: str
) -> None:
    sizes: list[int] = []
    page = sign_in(url=crowded.url, view=view, sizes=sizes)
    page.locator(f"main.view-{view} h1").wait_for()
    page.wait_for_load_state()
    assert 50_000 < sum(sizes) < MOST_BYTES
    assert faults(page) == {}


def test_dialogs_and_model_list_neither_clip_nor_cover_content(sign_in: SignIn, crowded: FakeFleet) -> None:
    page = sign_in(url=crowded.url)
    page.get_by_role("button", name=f"Actions for {COLD}").click()
    page.get_by_role("menuitem", name="Load…").click()
    page.get_by_role("dialog").get_by_role("row", name=LONG_NODE).wait_for()
    assert faults(page) == {}
    page.keyboard.press("Escape")
    page.get_by_role("button", name=f"Actions for {LONG_NODE}", exact=True).click()
    page.get_by_role("menuitem", name="Unload all models…").click()
    assert faults(page) == {}
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Models", exact=True).click()
    page.get_by_role("row", name=COLD).wait_for()
    assert faults(page) == {}
    page.evaluate("location.hash = '#/keys'")
    page.get_by_role("button", name="Actions for account-1-1", exact=True).click()
    page.get_by_role("menuitem", name="Change limits…").click()
    page.get_by_role("dialog").get_by_label(UNBROKEN).wait_for()
    assert faults(page) == {}


def test_conversation_and_parameters_are_neither_clipped_nor_covered(sign_in: SignIn, crowded: FakeFleet) -> None:
    page = sign_in(url=crowded.url, view="playground")
    page.get_by_label("Model", exact=True).select_option(LONG_MODEL)
    page.get_by_label("Message", exact=True).fill(f"say # {UNBROKEN}\n\n| {UNBROKEN} | b |\n|-|-|\n| c | d |\n")
    page.keyboard.press("Enter")
    page.locator(".turn-foot", has_text="tokens").wait_for()
    assert faults(page) == {}
    for panel in ("Chats", "Parameters"):  # a sheet in a narrow window, and beside the chat in a wide one
        page.set_viewport_size({"width": 375, "height": 812})
        page.get_by_role("button", name=panel, exact=True).click()
        assert faults(page) == {}
