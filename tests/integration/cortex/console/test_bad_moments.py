"""What the console shows when something goes wrong, each in words: nothing that the user typed is lost."""

import threading

from playwright.sync_api import APIResponse, Page, Route, expect

from cortex.console.conftest import LONG, SignIn
from cortex.console.fake_fleet import ADMIN, ALICE, FakeFleet, running
from cortex.fake_node import FakeNode

XSS = [
    "<script>window.attacked=1</script>",
    '"><img src=x onerror=window.attacked=1>',
    "<svg/onload=window.attacked=1>",
    "<iframe srcdoc='<script>parent.attacked=1</script>'></iframe>",
    "[link](javascript:window.attacked=1)",
    '![image](x" onerror="window.attacked=1)',
    "<math><mi//xlink:href='data:x,<script>window.attacked=1</script>'>",
    "<a href='jav&#x09;ascript:window.attacked=1'>x</a>",
    "<style>@import 'javascript:window.attacked=1'</style>",
    "<form action=javascript:window.attacked=1><button>x",
    "```\n</code></pre><script>window.attacked=1</script>\n```",
    "<b onmouseover=window.attacked=1 style=position:fixed;inset:0>x</b>",
    "{{constructor.constructor('window.attacked=1')()}}",
    "<noscript><p title='</noscript><img src=x onerror=window.attacked=1>'>",
    r"$\href{javascript:window.attacked=1}{x}$ $\url{javascript:window.attacked=1}$ $\includegraphics{x}$",
    r"$\htmlId{a}{x}$ $\htmlData{onload=window.attacked=1}{x}$ $\htmlStyle{position:fixed;inset:0}{x}$",
    r"$\text{<img src=x onerror=window.attacked=1>}$",
    "$$\n\\text{</annotation></math><script>window.attacked=1</script>}\n$$",
    r"$\def\a{\a\a}\a$ $\rule{1e9em}{1e9em}$",
    "```html\n<img src=x onerror=window.attacked=1><script>window.attacked=1</script>\n```",
    "```js\n`${window.attacked=1}`</code></pre><svg onload=window.attacked=1>\n```",
    '```x"onmouseover="window.attacked=1\nx\n```',
]


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def until(page: Page, expression: str) -> None:
    """Wait until a JavaScript expression is true. Playwright's own function needs `eval`, which the page forbids."""
    while not page.evaluate(expression):
        page.wait_for_timeout(20)


def chosen_model(page: Page, model: str = "Org/M") -> None:
    page.get_by_label("Model", exact=True).first.select_option(model)


def test_scripts_in_answers_and_prompts_do_not_run(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    for number, text in enumerate(XSS, 1):
        send(page, f"say {text}")
        expect(page.get_by_text("5 tokens")).to_have_count(number)
    for element in page.locator(".turns a, .turns b").all():
        element.hover(force=True)
    assert page.evaluate("window.attacked") is None
    assert page.locator(".katex").count() > 2  # KaTeX shows commands that it refuses as text
    assert page.locator(".turns :is(script, iframe, img, form, style), .katex :is(a, [id], [href])").count() == 0
    assert page.locator(".turns :is(svg, math):not(.katex *)").count() == 0
    links = page.locator(".turns a").evaluate_all("all => all.map((one) => one.protocol)")
    assert set(links) <= {"http:", "https:", ":"}


def test_scripts_in_names_of_models_nodes_and_keys_do_not_run(sign_in: SignIn) -> None:
    name = "Org/<img src=x onerror=window.attacked=1>"
    node = FakeNode(name='"><script>window.attacked=1</script>').holds(name)
    node.load_error = (500, {"error": name})
    with running(node, models=[{"id": "Org/Bad"}]) as fleet:
        fleet.call("POST", "/api/models/load?wait_secs=5", {"model": "Org/Bad"})
        fleet.ask(model=name)
        page = sign_in(url=fleet.url)
        page.get_by_text(name).first.wait_for()
        for view in ("playground", "activity", "keys", "usage", "connect"):
            page.evaluate(f"location.hash = '#/{view}'")
            page.locator(f"main.view-{view} h1").wait_for()
        page.get_by_role("button", name="curl").click()
        assert page.evaluate("window.attacked") is None
        assert page.locator("main img").count() == 0
        page.goto("about:blank")


def test_formula_and_highlight_scripts_load_only_for_answers_with_formulas_or_code(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    resources = "performance.getEntriesByType('resource').filter((one) => /katex|highlight/.test(one.name)).length"
    send(page, "say It costs $5 and not $6, `$x$`")
    expect(page.locator(".markdown")).to_have_text("It costs $5 and not $6, $x$")
    assert page.evaluate(resources) == 0
    send(
        page,
        "say So $e^{i\\pi}+1=0$ and \\(a_1\\)\n\n$$\n\\frac{a}{b}\n\nx\n$$\n\n$\\nope{$ stays\n\n"
        "```py\ndef f(): pass\n```",
    )
    answer = page.locator(".markdown").last
    expect(answer.locator(".katex")).to_have_count(3)
    expect(answer.locator(".formula.display .mfrac")).to_have_count(1)
    expect(answer).to_contain_text("\\nope{ stays")
    expect(answer.locator(".hljs-keyword").first).to_have_text("def")
    expect(answer.locator("pre")).to_have_text("def f(): pass")
    # The formulas may be there before the stylesheet that names the font.
    page.wait_for_function(
        "document.fonts.load('1em KaTeX_Main').then((all) => all.length > 0 && all[0].status === 'loaded')"
    )


def test_html_in_an_answer_is_shown_as_text(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    send(page, "say Use <b>bold</b> and **strong**")
    expect(page.locator(".markdown")).to_have_text("Use <b>bold</b> and strong")
    assert page.locator(".markdown strong").count() == 1


def test_right_to_left_text_keeps_its_direction(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    send(page, "say שלום עולם")
    block = page.locator(".markdown .block")
    block.wait_for()
    assert block.evaluate("(one) => getComputedStyle(one).direction") == "rtl"


def test_answer_of_100000_characters_is_shown_completely(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    assert len(LONG) > 100_000
    send(page, "long")
    page.get_by_text("5 tokens").wait_for()
    assert page.locator(".markdown .block").count() == 1000
    expect(page.locator(".markdown .block").last).to_contain_text("Paragraph 999")


def test_broken_stream_keeps_the_received_text_and_offers_a_retry(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    send(page, "cut")
    page.get_by_role("alert").get_by_text("The answer is incomplete.").wait_for()
    expect(page.locator(".markdown")).to_contain_text("The first half")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.locator(".bubble")).to_have_text("cut")


def test_stop_button_ends_the_stream_and_the_request_on_the_node(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    send(page, "wait")
    page.get_by_text("Still writing").wait_for()
    page.get_by_role("button", name="Stop").first.click()
    page.get_by_text("stopped").wait_for()
    fleet.until(lambda: fleet.nodes["n1"].speaking == 0)


def test_tool_call_is_shown_and_the_result_entered_by_the_user_is_sent(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    send(page, "call")
    page.get_by_label("Result of look_up").fill("say found")
    page.get_by_role("button", name="Send 1 result").click()
    page.get_by_text("found", exact=True).wait_for()
    body = fleet.nodes["n1"].bodies[-1]
    assert b'"role":"tool"' in body and b'"tool_call_id":"c1"' in body


def test_image_is_sent_only_to_a_model_that_sees_images(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    assert page.get_by_role("button", name="Add image").count() == 0
    chosen_model(page, "Org/Eyes")
    pixel = bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001"
        "a5f645400000000049454e44ae426082"
    )
    page.locator("input[type=file]").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": pixel})
    page.get_by_alt_text("a.png").wait_for()
    send(page, "say seen")
    page.get_by_text("5 tokens").wait_for()
    assert b'"image_url":{"url":"data:image/png;base64,' in fleet.nodes["n1"].bodies[-1]


def test_sign_in_after_an_expired_session_keeps_the_draft_and_the_conversation(
    sign_in: SignIn, fleet: FakeFleet
) -> None:
    page = sign_in(ALICE, view="playground")
    chosen_model(page)
    send(page, "say first")
    page.get_by_text("5 tokens").wait_for()
    page.get_by_label("Message", exact=True).fill("a long text that must not be lost")
    page.context.clear_cookies()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Sign in")
    expect(dialog).to_contain_text("Your session has ended.")
    expect(page.locator(".bubble").last).to_have_text("a long text that must not be lost")
    dialog.get_by_label("API key").fill(ALICE)
    dialog.get_by_role("button", name="Sign in").click()
    dialog.wait_for(state="detached")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_text("5 tokens")).to_have_count(2)
    assert page.locator(".bubble").count() == 2


def test_sign_out_shows_no_session_expired_dialog_if_the_event_stream_ends_first(sign_in: SignIn) -> None:
    page = sign_in()
    page.get_by_role("button", name="Actions for n1", exact=True).wait_for()  # it arrives on the stream
    signed_out: list[tuple[Route, APIResponse]] = []
    ended: list[str] = []

    def hold(route: Route) -> None:
        if route.request.method == "DELETE":
            signed_out.append((route, route.fetch()))
        else:
            route.continue_()

    page.route("**/api/session", hold)
    page.on("requestfinished", lambda request: ended.append(request.url))
    page.on("requestfailed", lambda request: ended.append(request.url))
    page.get_by_role("button", name="Sign out").click()
    while not signed_out or not any("/api/events" in url for url in ended):
        page.wait_for_timeout(20)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    (route, response), *_ = signed_out
    route.fulfill(response=response)
    expect(page.get_by_role("heading", name="Sign in to this gateway")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_reload_of_the_page_keeps_the_conversation_and_the_draft(sign_in: SignIn) -> None:
    page = sign_in(view="playground")
    chosen_model(page)
    send(page, "say kept")
    page.get_by_text("5 tokens").wait_for()
    page.get_by_label("Message", exact=True).fill("half a thought")
    until(page, "Object.values(sessionStorage).some((text) => text.includes('half a thought'))")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("half a thought")
    expect(page.locator(".markdown")).to_have_text("kept")


def test_api_key_is_in_no_storage_that_scripts_of_the_page_can_read(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in(view="playground")
    page.get_by_label("Message", exact=True).fill("draft")
    until(page, "Object.keys(sessionStorage).length > 0")
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, location.href, document.cookie])")
    assert ADMIN not in stored and "helexa_session" not in stored
    [cookie] = page.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["name"] == "helexa_session"


def test_page_of_a_revoked_key_says_that_the_key_was_revoked(sign_in: SignIn, fleet: FakeFleet) -> None:
    made = fleet.call("POST", "/api/keys", {"account_id": "dora"})
    page = sign_in(made["key"], view="usage")
    page.get_by_text("No usage in this period").wait_for()
    fleet.call("DELETE", f"/api/keys/{made['key_id']}")
    expect(page.get_by_role("dialog", name="Sign in")).to_contain_text("This API key was revoked; use another one.")


def test_failed_load_is_shown_with_its_reason(sign_in: SignIn, fleet: FakeFleet) -> None:
    node = fleet.nodes["n2"]
    node.load_error = (400, {"error": "the weights are truncated"})
    page = sign_in()
    page.get_by_role("button", name="Load model…").click()
    page.get_by_label("Model", exact=True).fill("Org/New")
    page.get_by_text("it loads into free memory").wait_for()
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.get_by_role("alert").first).to_contain_text("weights are truncated")
    node.load_error = None
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Try again…").click()
    page.get_by_role("dialog").get_by_role("button", name="Load", exact=True).click()
    row = page.locator(".node").get_by_role("row", name="Org/New")
    expect(row).to_contain_text("warm")
    page.get_by_role("button", name="Actions for Org/New").click()
    page.get_by_role("menuitem", name="Unload…").click()
    expect(page.get_by_role("dialog")).to_contain_text("Org/New leaves the memory of n2.")
    page.get_by_role("button", name="Unload", exact=True).click()
    expect(row).to_have_count(0)


def test_dead_node_is_listed_with_the_reason_for_its_failure(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in()
    page.get_by_role("button", name="Actions for n2", exact=True).wait_for()
    fleet.nodes["n2"].down = True
    try:
        expect(page.get_by_role("alert")).to_contain_text("n2 is down. /models answered HTTP 500")
    finally:
        fleet.nodes["n2"].down = False
    expect(page.get_by_role("alert")).to_have_count(0)


def test_open_dialog_says_that_another_admin_has_changed_the_node(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in()
    page.get_by_role("button", name="Actions for n2", exact=True).click()
    page.get_by_role("menuitem", name="Cordon…").click()
    dialog = page.get_by_role("dialog", name="Cordon a node")
    dialog.get_by_text("gets no new requests").wait_for()
    fleet.call("POST", "/api/nodes/n2/cordon")
    try:
        expect(dialog).to_contain_text("The node has changed meanwhile.")
        expect(dialog.get_by_role("button", name="Cordon")).to_be_disabled()
    finally:
        fleet.call("POST", "/api/nodes/n2/uncordon")


def test_open_dialog_of_a_node_says_that_the_node_was_removed(sign_in: SignIn, fleet: FakeFleet) -> None:
    page = sign_in()
    page.get_by_role("button", name="Actions for n2", exact=True).click()
    page.get_by_role("menuitem", name="Drain…").click()
    gateway = fleet.cortex.gateway
    sections = gateway.config.neurons
    fleet.loop.call_soon_threadsafe(gateway.fleet.configure, sections[:1])
    try:
        expect(page.get_by_role("dialog")).to_contain_text("n2 is not in the configuration any more.")
    finally:
        fleet.loop.call_soon_threadsafe(gateway.fleet.configure, sections)
    expect(page.get_by_role("button", name="Actions for n2", exact=True)).to_be_visible()


def test_console_page_without_a_connection_says_that_its_data_are_not_live_and_reconnects(sign_in: SignIn) -> None:
    page = sign_in()
    page.get_by_role("button", name="Actions for n1", exact=True).wait_for()
    page.context.set_offline(True)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # reconnects, as after a sleep
    page.get_by_text("Not live.").wait_for()
    page.context.set_offline(False)
    page.get_by_text("Not live.").wait_for(state="detached")


def test_gateway_without_required_keys_asks_for_an_admin_key_only_for_changes(sign_in: SignIn) -> None:
    with running(FakeNode(name="n1").holds("Org/M"), require_auth=False) as fleet:
        page = sign_in(None, url=fleet.url)
        page.get_by_role("button", name="Load model…").click()
        dialog = page.get_by_role("dialog", name="Sign in as an admin")
        expect(dialog).to_contain_text("Loading a model needs an admin: open a sign-in link, or enter an admin's key.")
        dialog.get_by_label("API key").fill(ALICE)
        dialog.get_by_role("button", name="Sign in").click()
        expect(dialog.get_by_role("alert")).to_contain_text("it is not an admin's key")
        page.goto("about:blank")


def test_console_reports_a_drained_node_as_empty_after_its_last_request(sign_in: SignIn, fleet: FakeFleet) -> None:
    request = threading.Thread(
        target=fleet.ask, kwargs={"stream": True, "messages": [{"role": "user", "content": "wait"}]}
    )
    fleet.nodes["n1"].go_on.clear()
    request.start()
    page = sign_in()
    page.get_by_role("button", name="Actions for n1", exact=True).click()
    page.get_by_role("menuitem", name="Drain…").click()
    expect(page.get_by_role("dialog")).to_contain_text("1 running request can finish.")
    page.get_by_role("button", name="Drain", exact=True).click()
    page.locator(".node").first.get_by_text("draining").wait_for()
    fleet.nodes["n1"].go_on.set()
    request.join()
    page.get_by_text("n1 is empty and can be stopped.").wait_for()
    page.get_by_role("button", name="Actions for n1", exact=True).click()
    page.get_by_role("menuitem", name="Uncordon…").click()
    page.get_by_role("button", name="Uncordon", exact=True).click()
    page.locator(".node").first.get_by_text("up", exact=True).wait_for()
