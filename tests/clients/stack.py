"""helexa as people run it: a node with a real model and a gateway in front of it, each a process of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import openai
import psutil

MODEL = "helexa/small"
PATIENCE_SECONDS = 120.0  # a bound for waits on a busy machine, never a measure

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_UNWANTED = ("HELEXA_", "CORTEX_", "NEURON_", "OPENAI_")


class Server:
    """One server process, its log and its end."""

    def __init__(self, module: str, arguments: Iterable[str], log: Path) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_UNWANTED)}
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until the condition holds and return what it gave."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended by itself:\n{self.log.read_text()}"
            if outcome := condition():
                return outcome
            time.sleep(0.02)
        raise AssertionError(f"waited in vain until {what}:\n{self.log.read_text()}")

    def end(self) -> int:
        """Ask the process to end and return its exit code; what it leaves running is killed and is an error."""
        if self.process.poll() is not None:
            return self.process.returncode
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            _, left = psutil.wait_procs(children, timeout=5)
            for child in left:
                child.kill()
            assert not left, f"{left} outlived the server"


class Stack:
    """A node and a gateway; leaving the block ends both.

    Args:
        folder: takes configuration files and logs.
        node_config, catalogue: more text for the node's configuration and the gateway's catalogue.

    Attributes:
        node_url, url, metrics_url: of the node's API, the gateway's API and its Prometheus text.
    """

    def __init__(self, model: Path, folder: Path, *, node_config: str = "", catalogue: str = "") -> None:
        self._folder = folder
        self._servers: list[Server] = []
        self._port = free_port()
        self.node_url = f"http://127.0.0.1:{self._port}"
        (folder / "neuron.toml").write_text(
            f'host = "127.0.0.1"\n[[default_models]]\nmodel_id = "{MODEL}"\nsource = "file:{model}"\n'
            f"[harness.torch]\nkv_cache_mb = 512\n{node_config}"
        )
        (folder / "models.toml").write_text(f'{catalogue}[aliases]\nsmall = "{MODEL}"\n')
        (folder / "cortex.toml").write_text(
            'models_config = "models.toml"\n'
            '[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\npoll_interval_secs = 0.5\n'
            f'[ledger]\nurl = "sqlite:{folder}/cortex.db"\n'
            f'[[neurons]]\nname = "n1"\nendpoint = "{self.node_url}"\n'
        )

    def __enter__(self) -> Self:
        try:
            self.cortex = self._start("cortex", "serve", "-c", str(self._folder / "cortex.toml"))
            self.start_node()
            pattern = re.compile(r"listening on (http://\S+), metrics on (http://\S+)")
            found = self.cortex.until(lambda: pattern.search(self.cortex.log.read_text()), "the gateway listens")
            self.url, self.metrics_url = found.groups()
            self.await_model()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        codes = [server.end() for server in self._servers]
        assert "Traceback" not in "".join(server.log.read_text() for server in self._servers)
        assert set(codes) <= {0, -signal.SIGKILL}, codes

    def start_node(self) -> None:
        """Start the node, at first or again."""
        self.node = self._start("neuron", "--config", str(self._folder / "neuron.toml"), "--port", str(self._port))

    def await_model(self) -> None:
        """Wait until the gateway knows that the node serves the model."""

        def serves() -> bool:
            nodes = get(f"{self.url}/api/nodes")["nodes"]
            return any(node["healthy"] and model["status"] == "loaded" for node in nodes for model in node["models"])

        self.cortex.until(serves, "the model is served")

    def engine(self) -> psutil.Process:
        """The process that runs the model."""
        children = psutil.Process(self.node.process.pid).children()
        (engine,) = [child for child in children if "helexa.neuron.engine.process" in child.cmdline()]
        return engine

    def load(self) -> dict[str, Any]:
        """What the node says of the model's load."""
        (load,) = get(f"{self.node_url}/health")["models"]
        return load

    def until_idle(self) -> None:
        """Wait until nothing of any request is left in the node."""

        def idle() -> bool:
            load = self.load()
            everything_free = load["kv_pages_free"] == load["kv_pages_total"] > 0
            return everything_free and load["in_flight"] == 0 and load["queue_depth"] == 0

        self.node.until(idle, "the node is idle and its KV cache is free")

    def client(self) -> openai.OpenAI:
        """The official client, which must see every failure and so never retries."""
        return openai.OpenAI(http_client=openai.DefaultHttpxClient(trust_env=False), **self._client_options())

    def async_client(self) -> openai.AsyncOpenAI:
        """The same, asynchronous."""
        return openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(trust_env=False), **self._client_options())

    def _client_options(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": PATIENCE_SECONDS}

    def _start(self, name: str, *arguments: str) -> Server:
        server = Server(f"helexa.{name}", arguments, self._folder / f"{name}.log")
        self._servers.append(server)
        return server


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def read(url: str) -> str:
    """The text at a URL."""
    with _direct.open(url, timeout=PATIENCE_SECONDS) as response:
        return response.read().decode()


def get(url: str) -> Any:
    """The JSON at a URL."""
    return json.loads(read(url))


def post(url: str, body: object) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON answer of a request; bytes are sent as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with _direct.open(request, timeout=PATIENCE_SECONDS) as response:
            return response.status, dict(response.headers), json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.load(error)
