"""Fixtures: a browser, and a gateway with fake nodes that all tests of this folder share."""

from collections.abc import Callable, Iterator

import pytest
from aiohttp import web
from playwright.sync_api import Browser, Page, Response, expect

import browsing
from cortex.console.fake_fleet import ADMIN, FakeFleet, running
from cortex.fake_node import DONE, ROLE, FakeNode, begin, chunk, event, respond

SignIn = Callable[..., Page]
PATIENCE_MS = 30_000  # a limit for a busy machine; no test measures time with it
LONG = "\n\n".join(f"Paragraph {number}: {'word ' * 18}" for number in range(1000))


@pytest.fixture(scope="module")  # while it runs, asynchronous tests cannot run in this process
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with browsing.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def fleet() -> Iterator[FakeFleet]:
    """A gateway with two nodes. n1 serves Org/M and a model that sees images. n2 can load Org/New of the catalog."""
    first = FakeNode(name="n1", speak=speak).holds("Org/M", tool_call=True, limit={"context": 8192}, vram_used_mb=500)
    first.holds("Org/Eyes", capabilities=["text", "vision"])
    second = FakeNode(name="n2", speak=speak).with_accelerator(24_000, {"Org/New": 6000})
    prices = {"input": 1.0, "output": 4.0}
    models = [
        {"id": "Org/M", "cost": prices},
        {"id": "Org/Eyes"},
        {"id": "Org/New", "vram_mb": 6000, "pinned_on": ["n2"]},
    ]
    with running(first, second, models=models, aliases={"small": "Org/M"}) as fleet:
        yield fleet


@pytest.fixture
def sign_in(browser: Browser, fleet: FakeFleet) -> Iterator[SignIn]:
    """Function that opens a view of the console in a new context, signed in with a key. Script errors fail the test.

    The function adds the size of each response in bytes to `sizes`.
    """
    pages: list[tuple[Page, list[str]]] = []

    def sign_in(
        key: str | None = ADMIN, view: str = "fleet", url: str = "", sizes: list[int] | None = None, **options
    ) -> Page:
        context = browser.new_context(**{"reduced_motion": "reduce", **options})
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        pages.append((page, browsing.collect_problems(page)))
        if sizes is not None:
            page.on("response", lambda response: sizes.append(_size(response)))
        if key is not None:  # the page shares the cookies of the context's requests
            assert context.request.post(f"{url or fleet.url}/api/session", data={"key": key}).ok
        page.goto(f"{url or fleet.url}/#/{view}")
        if key is not None:
            page.get_by_role("button", name="Sign out").wait_for()
        return page

    yield sign_in
    problems = [problem for page, found in pages for problem in found if "Failed to load resource" not in problem]
    for page, _ in pages:
        page.context.close()
    assert problems == []


def _size(response: Response) -> int:
    return 0 if "/api/events" in response.url else len(response.body())


async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Answer with what the last message asks for: `say TEXT`, `long`, `cut`, `wait`, or a tool call."""
    body = await request.json()
    content = body["messages"][-1]["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    if not body.get("stream"):
        return await respond(node, request)
    if text == "cut":
        response = await begin(request, ROLE, chunk("The first half"))
        assert request.transport is not None
        request.transport.close()
        return response
    if text == "wait":
        response = await begin(request, ROLE, chunk("Still "), chunk("writing"))
        await node.go_on.wait()
        return response
    if text == "call":
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"q":"x"}'}}
        delta = event(choices=[{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}])
        end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])
        return await begin(request, ROLE, delta, end, DONE)
    words = LONG if text == "long" else text.removeprefix("say ") if text.startswith("say ") else "Hello"
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "a thought"}, "finish_reason": None}])
    pieces = [chunk(words[start : start + 1000]) for start in range(0, len(words), 1000)]
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    usage = event(usage={"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14})
    return await begin(request, ROLE, thought, *pieces, end, usage, DONE)
