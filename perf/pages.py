"""Measure how fast Chromium paints the web pages of helexa-bench, and the size of the pages.

usage: python perf/pages.py

The database of helexa-bench contains 50,000 random runs.
"""

import asyncio
import shutil
import statistics
import sys
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "integration"))

from bench import fleet_history
from helexa.bench.app import create_app
from helexa.http.listener import Listener, bind

CHOICE = "?target=beast&model=Qwen/Qwen3-8B"
PATHS = (
    "/",
    f"/trends{CHOICE}&scenario=single:cold:4096",
    "/runs",
    "/compare",
    f"/capacity{CHOICE}",
    f"/context{CHOICE}",
)
TIMES = 7


def main() -> None:
    """Create the database, serve the web pages of helexa-bench, and print a line for each page."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "bench.sqlite"
        fleet_history.write(database, 50_000)
        bound = bind(("127.0.0.1", 0))
        listener = Listener(create_app(database))
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_until_complete, args=(listener.serve(bound),))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        thread.start()
        try:
            measure(address)
        finally:
            loop.call_soon_threadsafe(setattr, listener, "should_exit", True)
            thread.join()


def measure(address: str) -> None:
    """Measure the first contentful paint of each page at the server `address`.

    Each measurement uses a new browser context without cache. The first measurement of a page is printed separately,
    because the server then has not cached the results of its queries.
    """
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for path in PATHS:
            paints, weight = [], 0
            for _ in range(TIMES):
                page = browser.new_context().new_page()
                weights: list[int] = []
                page.on("response", lambda response, into=weights: into.append(len(response.body())))
                page.goto(address + path, wait_until="load")
                paint = "performance.getEntriesByName('first-contentful-paint')[0]"
                while (painted := page.evaluate(f"{paint}?.startTime")) is None:  # the CSP forbids `wait_for_function`
                    page.wait_for_timeout(20)
                paints.append(painted)
                weight = sum(weights)
                page.context.close()
            later = statistics.median(paints[1:])
            print(f"{path:60} first {paints[0]:6.0f} ms  then {later:6.0f} ms  {weight / 1000:6.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
