"""Measure the console in Chromium: first paint, size, smoothness with a large fleet, and the time until a fault shows.

usage: python perf/console.py [--nodes 200] [--models 20] [--rows 10000]

    paint     first contentful paint and size of each view, in new browser contexts without a cache
    smooth    longest main-thread tasks (elapsed time and CPU time) while the fleet changes, and during expanding,
              filtering, scrolling and typing, with --nodes nodes of --models models, and --rows finished requests; a
              frame waits for the task that runs
    fault     seconds until the fleet shows a node that stopped answering, and a load that failed
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from playwright.sync_api import Browser, Error, Page
from support.output import print_line

sys.path.extend(str(Path(__file__).parent.parent / "tests" / part) for part in ("", "unit", "integration"))

import browsing
from cortex.console.fake_fleet import running
from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually
from helexa.core.catalog import Catalog
from helexa.cortex import gateway
from helexa.cortex.app import create_app
from helexa.cortex.config import CortexConfig
from helexa.cortex.ledger.activity_and_usage_totals import Activity
from helexa.cortex.metrics import Metrics
from helexa.http.listener import Listener, bind

VIEWS = ("fleet", "playground", "activity", "keys", "usage", "connect", "log")
TIMES = 7
TOTAL_MB = 81_920


class ManyNodes:
    """One server that answers the polls of many nodes, each under a path of its own, with changing figures."""

    def __init__(self, nodes: int, models: int) -> None:
        self.names = [f"node-{number:03}" for number in range(nodes)]
        self.models = [f"Organization-{number % 7}/Model-{number}-Instruct" for number in range(models)]
        limit = {"context": 32_768, "output": 8192}
        self._listing = orjson.dumps(
            [{"id": model, "status": "loaded", "vram_used_mb": 3900, "limit": limit} for model in self.models]
        )

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{node}/models", self._models)
        app.router.add_get("/{node}/health", self._health)
        app.router.add_get("/{node}/discovery", self._discovery)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._listing, content_type="application/json")

    async def _health(self, _request: web.Request) -> web.Response:
        used = random.randint(60_000, 80_000)
        loads = [
            {
                "id": model,
                "in_flight": random.randint(0, 8),
                "queue_depth": random.randint(0, 2),
                "tok_s_decode": random.uniform(20, 400),
                "prompt_tokens_total": 10_000,
                "cached_prompt_tokens_total": random.randint(0, 10_000),
            }
            for model in self.models
        ]
        devices = [{"index": 0, "vram_used_mb": used, "vram_free_mb": TOTAL_MB - used}]
        body = orjson.dumps({"devices": devices, "models": loads})
        return web.Response(body=body, content_type="application/json")

    async def _discovery(self, request: web.Request) -> web.Response:
        devices = [{"index": 0, "name": "Accelerator 80 GB", "vram_total_mb": TOTAL_MB}]
        return web.json_response({"hostname": request.match_info["node"], "os": "Linux", "devices": devices})


@contextmanager
def large_gateway(nodes: int, models: int, rows: int) -> Iterator[str]:
    """Run a gateway with many nodes and a full activity log, in which five requests per second finish."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    address: list[str] = []

    async def serve(folder: str) -> None:
        many = ManyNodes(nodes, models)
        runner = web.AppRunner(many.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        config = CortexConfig.model_validate(
            {
                "gateway": {"poll_interval_secs": 10},
                "ledger": {"url": f"sqlite:{folder}/cortex.db"},
                "neurons": [{"name": name, "endpoint": f"{base}/{name}"} for name in many.names],
            }
        )
        async with gateway.running(config, Catalog(), Metrics()) as started:
            for number in range(rows):
                started.ledger.record(_activity(many, number))
                if number % 2000 == 0:
                    await started.ledger.flush()
            listener = Listener(create_app(started))
            bound = bind(("127.0.0.1", 0))
            serving = asyncio.create_task(listener.serve(bound))
            await eventually(lambda: all(node.healthy for node in started.fleet.view().nodes))
            address.append(f"http://127.0.0.1:{bound.getsockname()[1]}")
            ready.set()
            while not stop.is_set():
                for observe in started.observers:
                    observe(_activity(many, random.getrandbits(40)))
                await asyncio.sleep(0.2)
            listener.should_exit = True
            await serving
        await runner.cleanup()

    with tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=loop.run_until_complete, args=(serve(folder),))
        thread.start()
        ready.wait()
        try:
            yield address[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


def _activity(many: ManyNodes, number: int) -> Activity:
    now = int(time.time() * 1000)
    return Activity(
        request_id=f"{number:032x}",
        started_ms=now - number % 100_000,
        api="/v1/chat/completions",
        model=many.models[number % len(many.models)],
        status=200 if number % 17 else 503,
        duration_ms=1000.0 + number % 5000,
        account_id=f"account-{number % 40}",
        key_id=f"key-{number % 40}",
        node=many.names[number % len(many.names)],
        route=f"node={many.names[number % len(many.names)]}; why=affinity; load=2; candidates=4",
        prompt=number % 9000,
        completion=number % 700,
        ttft_ms=120.0,
        tokens_per_second=61.5,
    )


def paint(browser: Browser, url: str) -> None:
    """Print the first contentful paint and the size of each view."""
    for view in VIEWS:
        paints, sizes = [], [0]
        for _ in range(TIMES):
            page = browser.new_context().new_page()
            sizes = []
            page.on("response", lambda response, into=sizes: into.append(_size(response)))
            page.goto(f"{url}/#/{view}")
            page.locator(f"main.view-{view} h1").wait_for()
            entry = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            while (painted := page.evaluate(entry)) is None:
                page.wait_for_timeout(20)
            paints.append(painted)
            page.context.close()
        print_line(part="paint", view=view, first_paint_ms=round(statistics.median(paints)), bytes=sum(sizes))


def _size(response: Any) -> int:
    """Return the length of a response, or 0 for a stream and for a response that the end of the page interrupts."""
    try:
        return 0 if "/api/events" in response.url else len(response.body())
    except Error:
        return 0


class Trace:
    """Records the main thread's tasks of a page while a `with` block runs, and prints the longest ones."""

    def __init__(self, page: Page, name: str) -> None:
        self._page, self._name = page, name
        self._session = page.context.new_cdp_session(page)
        self._events: list[dict[str, Any]] = []
        self._complete = False

    def __enter__(self) -> None:
        self._session.on("Tracing.dataCollected", lambda data: self._events.extend(data["value"]))
        self._session.on("Tracing.tracingComplete", lambda _data: setattr(self, "_complete", True))
        categories = "toplevel,disabled-by-default-devtools.timeline,devtools.timeline,__metadata"
        self._session.send("Tracing.start", {"categories": categories, "transferMode": "ReportEvents"})

    def __exit__(self, *_: object) -> None:
        self._session.send("Tracing.end")
        while not self._complete:
            self._page.wait_for_timeout(20)
        main = {
            (event["pid"], event["tid"])
            for event in self._events
            if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
        }
        tasks = [
            event
            for event in self._events
            if event.get("ph") == "X" and event["name"] == "RunTask" and (event["pid"], event["tid"]) in main
        ]
        longest = sorted((task["dur"] / 1000 for task in tasks), reverse=True)[:3]
        cpu = max((task.get("tdur", 0) / 1000 for task in tasks), default=0)
        over = sum(task["dur"] > 100_000 for task in tasks)
        print_line(
            part="smooth",
            step=self._name,
            longest_ms=[round(task) for task in longest],
            longest_cpu_ms=round(cpu),
            over_100_ms=over,
        )


def smooth(browser: Browser, url: str) -> None:
    """Print the longest tasks of the main thread while a user works with a large fleet."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    with Trace(page, "open the fleet"):
        page.goto(f"{url}/#/fleet")
        page.locator(".node").nth(100).wait_for(state="attached")
        page.wait_for_timeout(2000)
    with Trace(page, "watch the fleet"):
        page.wait_for_timeout(5000)
    with Trace(page, "expand 10 nodes"):
        for number in range(10):
            page.locator(".node .twist").nth(number).click()
    with Trace(page, "scroll the fleet"):
        _scroll(page)
    with Trace(page, "filter the fleet"):
        page.get_by_label("Filter nodes and models").press_sequentially("node-04", delay=80)
        page.wait_for_timeout(500)
    page.get_by_label("Filter nodes and models").fill("")
    with Trace(page, "list the models"):
        page.get_by_role("button", name="Models", exact=True).click()
        page.wait_for_timeout(2000)
    with Trace(page, "open the activity log"):
        page.evaluate("location.hash = '#/activity'")
        page.locator(".spacer .row").first.wait_for()
    with Trace(page, "scroll to the end of the activity log"):
        for _ in range(60):
            page.evaluate("document.querySelector('.rows').scrollBy(0, 12000)")
            page.wait_for_timeout(50)
    with Trace(page, "filter the activity log"):
        page.get_by_label("Filter requests").press_sequentially("account-7", delay=80)
        page.wait_for_timeout(500)
    with Trace(page, "watch the activity log"):
        page.wait_for_timeout(3000)
    page.context.close()


def _scroll(page: Page) -> None:
    for _ in range(40):
        page.mouse.wheel(0, 600)
        page.wait_for_timeout(30)


def fault(browser: Browser) -> None:
    """Print the seconds until a fault shows in the fleet view, with the default interval of polls."""
    node, other = FakeNode(name="n1").holds("Org/M"), FakeNode(name="n2")
    with running(node, other, require_auth=False, models=[{"id": "Org/New", "pinned_on": ["n2"]}]) as fleet:
        fleet.cortex.gateway.poller.interval_secs = 10.0
        page = browser.new_context().new_page()
        page.goto(f"{fleet.url}/#/fleet")
        page.locator(".node").first.wait_for()
        page.wait_for_timeout(2000)
        began = time.perf_counter()
        node.down = True
        page.get_by_text("answered HTTP 500").first.wait_for()
        print_line(part="fault", what="a node stopped answering", shown_after_secs=time.perf_counter() - began)
        other.load_error = (400, {"error": "the file is truncated"})
        began = time.perf_counter()
        fleet.ask(key=None, model="Org/New")
        page.get_by_text("the file is truncated").first.wait_for()
        print_line(part="fault", what="a load failed", shown_after_secs=time.perf_counter() - began)


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    with browsing.chromium() as browser:
        with running(FakeNode(name="n1").holds("Org/M"), require_auth=False) as fleet:
            paint(browser, fleet.url)
        with large_gateway(options.nodes, options.models, options.rows) as url:
            smooth(browser, url)
        fault(browser)


if __name__ == "__main__":
    main()
