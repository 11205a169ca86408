"""The chats of the playground: the list that the browser keeps, its bounds, edited messages, and presets."""

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from cortex.console.conftest import SignIn
from cortex.console.fake_fleet import ALICE, BOB, FakeFleet
from cortex.console.test_bad_moments import chosen_model, send

BLOCKED = """
for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("blocked", "SecurityError"); } });
"""
STORE = "import(document.querySelector('link[href$=\"lib.js\"]').href.replace('lib.js', 'chat_store.js'))"


def names(page: Page) -> Any:
    return page.locator(".chat-name bdi")


def say(page: Page, text: str) -> None:
    """Start a chat with a message, and wait until it is answered and stored."""
    if page.get_by_role("button", name="New chat").is_enabled():
        page.get_by_role("button", name="New chat").click()
    chosen_model(page)
    send(page, f"say {text}")
    expect(page.locator(".markdown")).to_have_text(text)
    expect(names(page).first).to_have_text(f"say {text}")


def last_body(fleet: FakeFleet) -> Any:
    return json.loads(fleet.nodes["n1"].bodies[-1])


def test_chats_are_listed_searched_renamed_exported_and_deleted(sign_in: SignIn, tmp_path: Path) -> None:
    page = sign_in(ALICE, view="playground", accept_downloads=True, viewport={"width": 1440, "height": 900})
    say(page, "apples")
    say(page, "<b>bananas</b>")
    page.get_by_label("Search chats").fill("APPLE")
    expect(names(page)).to_have_text(["say apples"])
    page.locator(".chat-name").click()
    expect(page.locator(".markdown")).to_have_text("apples")
    page.get_by_label("Search chats").fill("")

    page.get_by_role("button", name="Actions for chat say apples").click()
    page.get_by_role("menuitem", name="Rename…").click()
    page.get_by_label("Title").fill("Fruit")
    page.get_by_role("button", name="Rename").click()
    expect(names(page).filter(has_text="Fruit")).to_have_count(1)

    page.get_by_role("button", name="Actions for chat Fruit").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Export as Markdown").click()
    path = tmp_path / "chat.md"
    download.value.save_as(path)
    assert path.read_text() == "# Fruit\n\n## You\n\nsay apples\n\n## Org/M\n\napples\n"

    page.get_by_role("button", name="Actions for chat Fruit").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(names(page)).to_have_text(["say <b>bananas</b>"])
    expect(page.get_by_text("Start a conversation")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".markdown")).to_have_text("apples")
    page.reload()
    expect(page.locator(".markdown")).to_have_text("apples")
    expect(names(page)).to_have_text(["Fruit", "say <b>bananas</b>"])

    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").fill(BOB)
    page.get_by_role("button", name="Sign in").last.click()
    page.get_by_text("No chats yet.").wait_for()


def test_edited_message_is_sent_again_and_later_messages_are_dropped_until_undo(
    sign_in: SignIn, fleet: FakeFleet
) -> None:
    page = sign_in(view="playground")
    say(page, "one")
    send(page, "say two")
    expect(page.locator(".markdown")).to_have_text(["one", "two"])
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("say three")
    page.keyboard.press("Enter")
    expect(page.locator(".markdown")).to_have_text(["three"])
    assert [message["content"] for message in last_body(fleet)["messages"]] == ["say three"]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".markdown")).to_have_text(["one", "two"])


def test_preset_sets_the_system_prompt_and_new_presets_are_saved_in_the_browser(
    sign_in: SignIn, fleet: FakeFleet
) -> None:
    page = sign_in(view="playground")
    page.get_by_role("button", name="Parameters").click()
    page.get_by_label("Preset", exact=True).select_option("Translate to English")
    page.get_by_label("System prompt").fill("Translate into French.")
    page.get_by_role("button", name="Save as preset…").click()
    page.get_by_label("Name of the preset").fill("French")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Preset", exact=True)).to_have_value("French")
    say(page, "bonjour")
    body = last_body(fleet)
    assert body["temperature"] == 0
    assert body["messages"][0] == {"role": "system", "content": "Translate into French."}
    page.get_by_role("button", name="Reset", exact=True).click()
    page.reload()
    page.get_by_role("button", name="Parameters").click()
    page.get_by_label("Preset", exact=True).select_option("French")
    page.get_by_role("button", name="Delete preset").click()
    expect(page.get_by_label("Preset", exact=True)).to_have_value("")


def test_click_on_an_example_fills_the_message_field(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    page.get_by_role("button", name="Explain how a hash table works").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Explain how a hash table works, in five sentences.")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_full_browser_storage_deletes_the_oldest_chats(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    page.locator(".composer").wait_for()
    counts = page.evaluate(f"""async () => {{
        const store = await {STORE};
        const chat = (id, text) => ({{ id, at: id, title: "", parameters: {{}},
            panes: [{{ model: "M", turns: [{{ role: "user", text, at: 1 }}] }}] }});
        for (let id = 1; id <= 205; id += 1) store.writeChat("ops", chat(id, "hello"));
        const kept = store.readChats("ops");
        for (let id = 301; id <= 310; id += 1) store.writeChat("ops", chat(id, "x".repeat(900_000)));
        const large = store.readChats("ops").length;
        const problems = [store.writeChat("ops", chat(400, "x".repeat(2_000_000)))];
        const fill = () => {{  // with other data of the site
            for (let size = 4_000_000; size > 10; )
                try {{ localStorage.setItem(crypto.randomUUID(), "y".repeat(size)); }} catch {{ size >>= 1; }}
        }};
        fill();
        problems.push(store.writeChat("ops", chat(500, "x".repeat(800_000))));
        const last = store.readChats("ops")[0].id;
        for (const one of store.readChats("ops")) store.deleteChat("ops", one.id);
        fill();
        problems.push(store.writeChat("ops", chat(600, "x".repeat(800_000))));
        return {{ kept: [kept.length, kept[0].id, kept.at(-1).id], large, problems, last }};
    }}""")
    assert counts["kept"] == [200, 205, 6]
    assert counts["large"] == 3
    too_long, none, full = counts["problems"]
    assert "too long" in too_long and none == "" and "full" in full
    assert counts["last"] == 500


def test_blocked_browser_storage_is_reported_and_the_chat_still_works(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    page.add_init_script(BLOCKED)
    page.reload()
    chosen_model(page)
    send(page, "say works")
    expect(page.locator(".markdown")).to_have_text("works")
    page.get_by_text("This browser stores nothing for this page").wait_for()
    page.get_by_role("button", name="Theme: auto").click()
