"""The console in Chromium, with a real gateway and a node that runs a real model."""

import csv
import io
import re
import urllib.error
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from clients.stack import MODEL, Stack, get
from console.conftest import ADMIN, ALICE, BROKEN, SECOND, SignIn

UNSPENT = re.compile(r"^\s*0 of 20k\b")  # "40 of 20k" contains "0 of 20k"


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def set_parameter(page: Page, name: str, value: str) -> None:
    page.get_by_role("button", name="Parameters").click()
    page.get_by_label(name).fill(value)
    page.get_by_role("button", name="Parameters").click()


def test_playground_streams_the_answer_and_shows_its_speed(sign_in: SignIn) -> None:
    page = sign_in(ALICE, "playground")
    page.get_by_label("Model", exact=True).select_option(MODEL)
    set_parameter(page, "Maximum tokens", "300")  # a busy browser reads a short answer at once, which has no speed
    set_parameter(page, "Temperature", "0")
    send(page, "Write a long story about a dog who travels around the world.")
    foot = page.locator(".turn-foot")
    expect(foot).to_contain_text("300 tokens")
    expect(foot).to_contain_text("first token")
    expect(foot).to_contain_text("tok/s")
    expect(page.locator(".markdown")).to_contain_text("dog")


def test_stop_button_in_the_playground_ends_the_request_on_the_node(sign_in: SignIn, stack: Stack) -> None:
    page = sign_in(ALICE, "playground")
    page.get_by_label("Model", exact=True).select_option(MODEL)
    set_parameter(page, "Temperature", "0")  # random answers may be short
    send(page, "Write a long story about a dog who travels around the world.")
    page.locator(".markdown .block").first.wait_for()
    page.get_by_role("button", name="Stop").last.click()  # the composer's; the answer's moves with each line
    expect(page.locator(".turn-foot")).to_contain_text("stopped")
    stack.until_idle()


def test_console_loads_a_second_model_compares_answers_and_unloads_the_model(sign_in: SignIn) -> None:
    page = sign_in()
    page.get_by_role("button", name="Load model…").click()
    dialog = page.get_by_role("dialog", name="Load a model")
    dialog.get_by_label("Model", exact=True).fill(SECOND)
    expect(dialog).to_contain_text("would load")
    dialog.get_by_role("button", name="Load", exact=True).click()
    row = page.locator(".node").get_by_role("row", name=SECOND)
    row.get_by_role("progressbar").wait_for()
    expect(row).to_contain_text("warm")

    page.evaluate("location.hash = '#/playground'")
    page.get_by_label("Model", exact=True).select_option(MODEL)
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Model", exact=True).nth(1).select_option(SECOND)
    set_parameter(page, "Maximum tokens", "20")
    set_parameter(page, "Temperature", "0")
    send(page, "What is the capital of France?")
    expect(page.locator(".turn-foot", has_text="tokens")).to_have_count(2)
    for pane in page.locator(".markdown").all():
        expect(pane).to_contain_text("Paris")

    page.evaluate("location.hash = '#/fleet'")
    page.get_by_role("button", name=f"Actions for {SECOND}").click()
    page.get_by_role("menuitem", name="Unload…").click()
    expect(page.get_by_role("dialog")).to_contain_text("A new request for the model loads it again.")
    page.get_by_role("button", name="Unload", exact=True).click()
    expect(row).to_have_count(0)


def test_failed_model_load_is_shown_with_the_reason_given_by_the_node(sign_in: SignIn) -> None:
    page = sign_in()
    page.get_by_role("button", name="Load model…").click()
    page.get_by_label("Model", exact=True).fill(BROKEN)
    page.get_by_text("would load").wait_for()
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.locator(".node").get_by_role("row", name=BROKEN)).to_contain_text("truncated")


def test_console_drains_and_uncordons_a_node(sign_in: SignIn, stack: Stack) -> None:
    page = sign_in()
    page.get_by_role("button", name="Actions for n1", exact=True).click()
    page.get_by_role("menuitem", name="Drain…").click()
    expect(page.get_by_role("dialog")).to_contain_text("cannot be served elsewhere")
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_text("n1 is empty and can be stopped.").wait_for()
    assert get(f"{stack.url}/api/nodes", ADMIN)["nodes"][0]["cordoned"]
    page.get_by_role("button", name="Actions for n1", exact=True).click()
    page.get_by_role("menuitem", name="Uncordon…").click()
    page.get_by_role("button", name="Uncordon", exact=True).click()
    page.locator(".node").get_by_text("up", exact=True).wait_for()


def test_new_api_key_is_shown_once_spends_its_budget_and_can_be_revoked(sign_in: SignIn, stack: Stack) -> None:
    admin = sign_in(view="keys")
    admin.get_by_role("button", name="Create key…").click()
    admin.get_by_label("Account", exact=True).fill("dora")
    admin.get_by_label("Name of the key").fill("dora-laptop")
    admin.get_by_label("Tokens", exact=True).fill("20000")
    admin.get_by_role("button", name="Create key", exact=True).click()
    secret = admin.locator(".secret code").inner_text()
    admin.get_by_role("button", name="Copy").click()
    assert admin.evaluate("navigator.clipboard.readText()") == secret
    admin.get_by_role("button", name="Done").click()
    row = admin.get_by_role("row", name="dora-laptop")
    budget = row.locator(".budget .small")
    expect(budget).to_have_text(UNSPENT)
    assert secret not in admin.content()

    dora = sign_in(secret, "playground")
    dora.get_by_label("Model", exact=True).select_option(MODEL)
    set_parameter(dora, "Maximum tokens", "10")
    send(dora, "Hello")
    expect(dora.locator(".turn-foot")).to_contain_text("tokens")
    expect(budget).not_to_have_text(UNSPENT)
    spent = next(key["spent"] for key in get(f"{stack.url}/api/keys", ADMIN)["keys"] if key["account_id"] == "dora")
    expect(budget).to_have_text(re.compile(rf"^\s*{spent} of 20k\b"))
    dora.evaluate("location.hash = '#/usage'")
    dora.get_by_role("rowheader", name=MODEL).wait_for()

    admin.get_by_role("button", name="Actions for dora-laptop").click()
    admin.get_by_role("menuitem", name="Revoke…").click()
    admin.get_by_role("button", name="Revoke", exact=True).click()
    admin.get_by_text("dora-laptop is revoked.").wait_for()
    try:
        get(f"{stack.url}/v1/models", secret)
        raise AssertionError("the revoked key still works")
    except urllib.error.HTTPError as error:
        with error:
            assert error.code == 401
    expect(dora.get_by_role("dialog", name="Sign in")).to_contain_text("This API key was revoked; use another one.")


def test_usage_page_exports_the_charges_of_the_account_as_csv(sign_in: SignIn, tmp_path: Path) -> None:
    page = sign_in(ALICE, "playground")
    page.get_by_label("Model", exact=True).select_option(MODEL)
    set_parameter(page, "Maximum tokens", "5")
    send(page, "Hello")
    expect(page.locator(".turn-foot")).to_contain_text("tokens")
    page.evaluate("location.hash = '#/usage'")
    page.get_by_role("rowheader", name=MODEL).wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export CSV").click()
    path = tmp_path / "usage.csv"
    download.value.save_as(path)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert {row["account_id"] for row in rows} == {"alice"} and int(rows[0]["charged"]) > 0


def test_client_settings_copied_from_the_connect_page_work(sign_in: SignIn, stack: Stack) -> None:
    page = sign_in(ALICE, "connect")
    page.get_by_label("Model", exact=True).select_option(MODEL)
    page.get_by_role("button", name="OpenAI SDK").click()
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_text("Copied").first.wait_for()
    program = page.evaluate("navigator.clipboard.readText()").replace("YOUR_KEY", ALICE)
    assert "    model=" in program
    program = program.replace("    model=", "    max_tokens=16, model=")  # a random answer may be very long
    printed: list[str] = []
    variables: dict[str, Any] = {"print": printed.append}
    exec(program, variables)
    variables["client"].close()
    assert printed and printed[0]


def test_code_copied_from_the_playground_sends_the_request_of_the_playground(sign_in: SignIn, stack: Stack) -> None:
    page = sign_in(ALICE, "playground")
    page.get_by_label("Model", exact=True).select_option(MODEL)
    set_parameter(page, "Maximum tokens", "6")
    page.get_by_label("Message", exact=True).fill('Say "it\'s" \\ é')
    page.get_by_role("button", name="Copy as code").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Python").click()
    dialog.get_by_role("button", name="Copy").click()
    page.get_by_text("Copied").first.wait_for()
    program = page.evaluate("navigator.clipboard.readText()")
    assert "max_tokens=6" in program
    printed: list[str] = []
    environ = {"HELEXA_API_KEY": ALICE}
    program = program.replace("import os\n", "").replace("os.environ", repr(environ))
    exec(program, {"print": lambda text, **_: printed.append(text)})
    assert "".join(printed)


def test_dead_node_is_listed_with_the_reason_for_its_failure(sign_in: SignIn, stack: Stack) -> None:
    page = sign_in()
    page.locator(".node").get_by_text("up", exact=True).wait_for()
    stack.node.process.kill()
    stack.node.process.wait()
    expect(page.get_by_role("alert")).to_contain_text("n1 is down. Connection refused at http://127.0.0.1:")
    stack.start_node()
    stack.await_model()
    page.locator(".node").get_by_text("up", exact=True).wait_for()
