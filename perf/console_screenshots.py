"""Make the screenshots of the console for the documentation: `console-*.webp`.

The fleet is made up: a real gateway in front of fake nodes, which report hardware and speeds that this machine lacks.
"""

import argparse
import asyncio
import base64
import math
import random
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from aiohttp import web
from playwright.sync_api import Browser, Page

sys.path.extend(str(Path(__file__).parent.parent / "tests" / part) for part in ("", "unit", "integration"))

import browsing
from cortex.console.fake_fleet import ADMIN, FakeFleet, running
from cortex.fake_node import DONE, ROLE, FakeNode, begin, chunk, event
from helexa.cortex.fleet_history import History
from helexa.cortex.ledger.activity_and_usage_totals import Activity

IMAGES = Path(__file__).parent.parent / "docs" / "images"
QUALITY = 82
MOST_BYTES = 150_000
DAY_MS = 86_400_000
HOUR_SECS = 3600

QUESTION = "Why does prefix caching make the first token faster?"
ANSWER = """\
A node computes the keys and values of every prompt token before it can produce the first new token. This phase, the
**prefill**, takes most of the time to first token.

With prefix caching, the node keeps the KV pages of earlier prompts:

1. It hashes the new prompt page by page, 64 tokens each.
2. It reuses every page whose hash it already knows.
3. It computes only the rest.

```python
def reusable_pages(prompt: list[int], known: dict[bytes, Page]) -> list[Page]:
    pages = []
    for digest in page_hashes(prompt):
        if digest not in known:
            break
        pages.append(known[digest])
    return pages
```

| Prompt | Cached | Prefill |
|---|---|---|
| 8,000 tokens | 0 | 3.9 s |
| 8,000 tokens | 7,936 | 0.05 s |
"""
SHORT_ANSWER = """\
The model must read the whole prompt before it can write. A **prefix cache** keeps what it has already read, so a prompt
with the same beginning skips that part.

* The system prompt and the tools of an agent are read once.
* Later messages of a conversation add only a few tokens.
"""


async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
    model = (await request.json())["model"]
    text, pause = (ANSWER, 0.004) if "32B" in model else (SHORT_ANSWER, 0.008)
    response = await begin(request, ROLE)
    await asyncio.sleep(0.18)
    for start in range(0, len(text), 6):
        await response.write(chunk(text[start : start + 6]))
        await asyncio.sleep(pause)
    tokens = len(text) // 4
    usage: dict[str, Any] = {"prompt_tokens": 812, "completion_tokens": tokens, "total_tokens": 812 + tokens}
    usage["prompt_tokens_details"] = {"cached_tokens": 768}
    await response.write(
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]) + event(usage=usage) + DONE
    )
    return response


def load(model: str, running: int, queued: int, speed: float, prompt: int, cached: int) -> dict[str, Any]:
    return {
        "id": model,
        "in_flight": running,
        "queue_depth": queued,
        "tok_s_decode": speed,
        "prompt_tokens_total": prompt,
        "cached_prompt_tokens_total": cached,
    }


LARGE, VISION, CODER, SMALL = (
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen2.5-Coder-14B-Instruct",
    "helexa/small",
)
LOADING = "openai/gpt-oss-20b"


def nodes() -> list[FakeNode]:
    beast, attic, closet = (FakeNode(name=name, speak=speak) for name in ("beast", "attic", "closet"))
    limit = {"context": 65_536, "output": 8192}
    beast.holds(LARGE, vram_used_mb=21_300, limit=limit, tool_call=True, reasoning=True)
    beast.holds(VISION, vram_used_mb=9_100, limit={"context": 32_768}, capabilities=["text", "vision"])
    beast.discovery["devices"] = [
        {"index": index, "name": "NVIDIA GeForce RTX 4090", "vram_total_mb": 24_564} for index in range(2)
    ]
    beast.health = {
        "devices": [
            {"index": 0, "vram_used_mb": 21_900, "vram_free_mb": 2_664, "utilization_pct": 91, "temp_c": 68},
            {"index": 1, "vram_used_mb": 9_400, "vram_free_mb": 15_164, "utilization_pct": 12, "temp_c": 44},
        ],
        "models": [load(LARGE, 5, 1, 171.4, 4_812_000, 3_610_000), load(VISION, 1, 0, 88.2, 214_000, 31_000)],
    }
    attic.holds(CODER, vram_used_mb=15_800, limit={"context": 32_768, "output": 8192}, tool_call=True)
    attic.models.append(
        {"id": LOADING, "harness": "torch", "status": "loading", "progress": 0.62, "stage": "reading weights"}
    )
    attic.discovery["devices"] = [{"index": 0, "name": "NVIDIA GeForce RTX 3090", "vram_total_mb": 24_576}]
    attic.health = {
        "devices": [{"index": 0, "vram_used_mb": 18_700, "vram_free_mb": 5_876, "utilization_pct": 74, "temp_c": 71}],
        "models": [load(CODER, 2, 0, 62.8, 1_920_000, 1_540_000)],
    }
    closet.holds(SMALL, vram_used_mb=310, limit={"context": 8192})
    closet.discovery |= {"cpu": "Intel N100", "memory_total_mb": 15_800}
    closet.health = {
        "memory_total_mb": 15_800,
        "memory_free_mb": 11_900,
        "models": [load(SMALL, 0, 0, 74.5, 64_000, 41_000)],
    }
    return [beast, attic, closet]


def write_history(fleet: FakeFleet) -> None:
    """Write thirty days of charges to the ledger."""
    path = fleet.cortex.gateway.config.ledger.url.get_secret_value().removeprefix("sqlite:")
    today, chance, seq = int(time.time() * 1000) // DAY_MS, random.Random(7), 0
    shares = ((LARGE, "alice", 0.5), (CODER, "build-bot", 0.8), (VISION, "carol", 0.15), (SMALL, "alice", 0.05))
    with closing(sqlite3.connect(path, timeout=30)) as database, database:
        for day in range(30):
            weekend = (today - day) % 7 in (2, 3)
            for model, account, share in shares:
                for _ in range(40):
                    seq += 1
                    total = int(share * chance.uniform(0.6, 1.4) * (15_000 if weekend else 82_000))
                    charged, at = (total, (today - day) * DAY_MS + chance.randrange(DAY_MS // 2))
                    prompt, completion = int(charged * 0.88), int(charged * 0.12)
                    row = (9999, seq, f"r{seq}", account, f"{account}-laptop", 0, model, "beast", "settled", charged)
                    row += (charged, prompt, completion, int(prompt * chance.uniform(0.5, 0.8)), 0, at, at + 2000)
                    database.execute(f"INSERT INTO entries VALUES ({', '.join('?' * 17)})", row)


async def write_last_hour(fleet: FakeFleet) -> None:
    """Replace the gateway's history by one of made-up requests in the last hour."""
    gateway, chance, start = fleet.cortex.gateway, random.Random(5), time.time() - HOUR_SECS
    now = [start]
    gateway.history = history = History(gateway.fleet.view, lambda: now[0])
    speeds = {(LARGE, "beast"): 90, (CODER, "attic"): 55, (VISION, "beast"): 30, (SMALL, "closet"): 12}
    for second in range(0, HOUR_SECS + 30, 5):
        now[0] = start + second
        history.sample()
        for (model, node), speed in speeds.items():
            busy = 0.5 + 0.5 * math.sin(second / 500 + speed)
            if chance.random() < 0.2 * busy + 0.03:
                secs = chance.uniform(3, 25)
                request = Activity("r", int((now[0] - secs) * 1000), "/v1/chat/completions", model, 200, secs * 1000)
                request.node, request.ttft_ms = node, chance.lognormvariate(5.6, 0.5) * (1 + busy)
                request.completion = int(secs * speed * chance.uniform(0.8, 1.1))
                history.observe(request)


def open_page(browser: Browser, url: str, theme: Any, height: int = 900) -> Page:
    context = browser.new_context(
        viewport={"width": 1280, "height": height}, color_scheme=theme, device_scale_factor=1.5, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(url)
    page.get_by_label("API key").fill(ADMIN)
    page.get_by_role("button", name="Sign in").last.click()
    page.get_by_role("button", name="Sign out").wait_for()
    return page


def shoot(page: Page, folder: Path, name: str) -> None:
    page.mouse.move(0, 0)
    page.wait_for_timeout(400)
    session = page.context.new_cdp_session(page)
    data = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})["data"]
    content = base64.b64decode(data)
    assert len(content) < MOST_BYTES, f"{name} has {len(content)} bytes"
    (folder / f"console-{name}.webp").write_bytes(content)
    print(f"console-{name}.webp: {len(content)} bytes")
    page.context.close()


def main() -> None:
    """Take all screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=IMAGES, metavar="FOLDER", help="replace the images in FOLDER (default: %(default)s)"
    )
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    prices = {"input": 0.1, "output": 0.4, "cache_read": 0.02}
    models = [{"id": model, "vram_mb": 16_000, "cost": prices} for model in (LARGE, VISION, CODER, LOADING, SMALL)]
    with running(*nodes(), models=models) as fleet, browsing.chromium() as browser:
        write_history(fleet)
        fleet.run(write_last_hour(fleet))
        page = open_page(browser, f"{fleet.url}/#/fleet", "light", 820)
        page.locator(".node").nth(2).wait_for()
        shoot(page, folder, "fleet")
        page = open_page(browser, f"{fleet.url}/#/playground", "dark", 820)
        page.get_by_role("button", name="Compare").click()
        for place, model in enumerate((LARGE, CODER)):
            page.get_by_label("Model", exact=True).nth(place).select_option(model)
        page.get_by_label("Message", exact=True).fill(QUESTION)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Stop").last.wait_for()
        page.get_by_role("button", name="Send").wait_for()
        shoot(page, folder, "playground")
        page = open_page(browser, f"{fleet.url}/#/usage", "light", 640)
        page.get_by_role("rowheader", name=LARGE).wait_for()
        shoot(page, folder, "usage")


if __name__ == "__main__":
    main()
