"""The alert rules, and the dashboard: a real Prometheus scrapes a gateway and a node with a real model."""

import asyncio
import json
import math
import subprocess
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from clients.stack import TIMEOUT_SECONDS, Stack, get
from cortex.fake_node import FakeNode
from deployment.conftest import DEPLOY, adapted
from ports import free_port

FOLDER = DEPLOY / "prometheus"
KEY = "the-key"
VARIABLES = {"$__rate_interval": "30s", "$model": ".*", "$node": ".*"}
GPU = {"index": 0, "vram_used_mb": 900, "vram_free_mb": 100, "utilization_pct": 50, "temp_c": 60}

Command = Callable[[str, str], str]


def test_alert_rules_and_scrape_configuration_pass_promtool(program: Command) -> None:
    promtool = program("promtool", "prometheus")
    for arguments in (
        ("check", "rules", "helexa.rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "helexa.tests.yml"),
    ):
        done = subprocess.run([promtool, *arguments], check=False, cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def queries() -> list[str]:
    """Return the queries of all panels of the dashboard, with values for the variables of Grafana."""
    dashboard = json.loads((DEPLOY / "grafana" / "helexa.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    for variable, value in VARIABLES.items():
        found = [query.replace(variable, value) for query in found]
    return found


@pytest.fixture
def prometheus(program: Command, tmp_path: Path) -> Iterator[Callable[[str, str], str]]:
    """A function that starts Prometheus for a gateway's metrics URL and a node's URL, and returns Prometheus' URL."""
    command = program("prometheus", "prometheus")
    processes: list[subprocess.Popen[bytes]] = []

    def start(metrics_url: str, node_url: str) -> str:
        text = adapted(
            (FOLDER / "prometheus.yml").read_text(),
            {
                "scrape_interval: 15s": "scrape_interval: 1s",
                "127.0.0.1:31314": urllib.parse.urlsplit(metrics_url).netloc,
                "127.0.0.1:13131": urllib.parse.urlsplit(node_url).netloc,
                "helexa.rules.yml": str(FOLDER / "helexa.rules.yml"),
            },
        )
        (tmp_path / "prometheus.yml").write_text(text)
        port = free_port()
        processes.append(
            subprocess.Popen(
                [
                    command,
                    f"--config.file={tmp_path}/prometheus.yml",
                    f"--storage.tsdb.path={tmp_path}/tsdb",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ]
            )
        )
        return f"http://127.0.0.1:{port}"

    yield start
    for process in processes:
        process.terminate()
        process.wait()


def values(prometheus_url: str, query: str) -> list[float]:
    """Return the current values of a query, without NaN. Empty before Prometheus is ready."""
    try:
        answer: dict[str, Any] = get(f"{prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    except ConnectionError:
        return []
    except urllib.error.HTTPError as error:
        assert error.code == 503, error
        error.close()
        return []
    except OSError as error:  # urllib wraps a refused connection
        assert isinstance(error.__cause__ or error.args[0], ConnectionError), error
        return []
    numbers = [float(sample["value"][1]) for sample in answer["data"]["result"]]
    return [number for number in numbers if not math.isnan(number)]


async def test_every_query_of_the_grafana_dashboard_returns_data(
    prometheus: Callable[[str, str], str], smollm2_gguf: Path, tmp_path: Path, node: FakeNode
) -> None:
    node.models.clear()
    node.health = {"devices": [GPU]}  # a node that reports a GPU, because this machine may have none
    stack = Stack(
        smollm2_gguf,
        tmp_path,
        gateway_config=f'[[neurons]]\nname = "gpu"\nendpoint = "{node.url}"\n'
        f'[[entitlements.keys]]\nkey = "{KEY}"\naccount_id = "acme"\n',
    )
    await asyncio.to_thread(stack.__enter__)
    try:
        url = prometheus(stack.metrics_url, stack.node_url)
        without_data = set(queries())
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while without_data:
                await chat(stack)
                for query in sorted(without_data):
                    if await asyncio.to_thread(values, url, query):
                        without_data.discard(query)
        alerts = (await asyncio.to_thread(get, f"{url}/api/v1/rules"))["data"]["groups"][0]["rules"]
        assert len(alerts) == (FOLDER / "helexa.rules.yml").read_text().count("- alert:")
        assert [alert["name"] for alert in alerts if alert["health"] == "err"] == []
    except TimeoutError:
        pytest.fail(f"queries without data: {without_data}")
    finally:
        await asyncio.to_thread(stack.__exit__)


async def chat(stack: Stack) -> None:
    client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_SECONDS)
    async with client:
        stream = await client.chat.completions.create(
            model="small", max_tokens=8, stream=True, messages=[{"role": "user", "content": "Count to ten."}]
        )
        async for _ in stream:
            pass
