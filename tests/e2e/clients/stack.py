"""A node with a real model and a gateway in front of it, as two processes."""

import json
import os
import re
import signal
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

from ports import free_port

MODEL = "helexa/small"
TIMEOUT_SECONDS = 120.0  # a limit for a busy machine; no test measures time with it

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_UNWANTED = ("HELEXA_", "CORTEX_", "NEURON_", "OPENAI_")


class Server:
    """One server process and its log. `variables` are added to its environment."""

    def __init__(self, module: str, arguments: Iterable[str], log: Path, **variables: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_UNWANTED)}
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def until(self, condition: Callable[[], Any], description: str) -> Any:
        """Wait until `condition()` is true and return its value."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended by itself:\n{self.log.read_text()}"
            if outcome := condition():
                return outcome
            time.sleep(0.02)
        raise AssertionError(f"timeout while waiting until {description}:\n{self.log.read_text()}")

    def end(self) -> int:
        """Terminate the process and return its exit code; fail if child processes remain, and kill them."""
        if self.process.poll() is not None:
            return self.process.returncode
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(TIMEOUT_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            _, remaining = psutil.wait_procs(children, timeout=60)
            for child in remaining:
                child.kill()
            assert not remaining, f"{remaining} outlived the server"


class Stack:
    """A node and a gateway. Leaving the `with` block ends both.

    Args:
        folder: directory for configuration files and logs.
        node_config: TOML text to append to the node's configuration.
        catalog: TOML text to insert into the gateway's model catalog.
        gateway_config: TOML text to append to the gateway's configuration.
        key: API key with which this object asks the gateway, if the gateway requires keys.

    Attributes:
        node_url, url: base URLs of the node and of the gateway.
        metrics_url: URL of the gateway's Prometheus metrics.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        node_config: str = "",
        catalog: str = "",
        gateway_config: str = "",
        key: str | None = None,
    ) -> None:
        self._folder = folder
        self._key = key
        self._servers: list[Server] = []
        self._port = free_port()
        self.node_url = f"http://127.0.0.1:{self._port}"
        (folder / "neuron.toml").write_text(
            f'host = "127.0.0.1"\n[[default_models]]\nmodel_id = "{MODEL}"\nsource = "file:{model}"\n'
            f"[harness.torch]\nkv_cache_mb = 512\n{node_config}"
        )
        (folder / "models.toml").write_text(f'{catalog}[aliases]\nsmall = "{MODEL}"\n')
        (folder / "cortex.toml").write_text(
            'models_config = "models.toml"\n'
            '[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\npoll_interval_secs = 0.5\n'
            f'[ledger]\nurl = "sqlite:{folder}/cortex.db"\n'
            f'[[neurons]]\nname = "n1"\nendpoint = "{self.node_url}"\n{gateway_config}'
        )

    def __enter__(self) -> Self:
        try:
            self.cortex = self._start("cortex", "serve", "-c", str(self._folder / "cortex.toml"))
            self.start_node()
            pattern = re.compile(r"listening url=(http://\S+) metrics_url=(http://\S+)")
            match = self.cortex.until(lambda: pattern.search(self.cortex.log.read_text()), "the gateway listens")
            self.url, self.metrics_url = match.groups()
            self.await_model()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        codes = [server.end() for server in self._servers]
        logs = "\n".join(server.log.read_text() for server in self._servers)
        before, found, after = logs.partition("Traceback")
        assert not found, f"{before[-1000:]}{found}{after[:4000]}"
        assert set(codes) <= {0, -signal.SIGKILL}, codes

    def start_node(self) -> None:
        """Start the node, also after it has ended."""
        self.node = self._start("neuron", "--config", str(self._folder / "neuron.toml"), "--port", str(self._port))

    def await_model(self) -> None:
        """Wait until the gateway lists the model as loaded."""

        def serves() -> bool:
            nodes = get(f"{self.url}/api/nodes", self._key)["nodes"]
            return any(node["healthy"] and model["status"] == "loaded" for node in nodes for model in node["models"])

        self.cortex.until(serves, "the model is served")

    def engine(self) -> psutil.Process:
        """Return the engine process, which runs the model."""
        children = psutil.Process(self.node.process.pid).children()
        (engine,) = [child for child in children if "helexa.neuron.engine.process" in child.cmdline()]
        return engine

    def load(self) -> dict[str, Any]:
        """Return the node's report on the loaded model."""
        (load,) = get(f"{self.node_url}/health")["models"]
        return load

    def until_idle(self) -> None:
        """Wait until the node holds no state of any request."""

        def idle() -> bool:
            load = self.load()
            everything_free = load["kv_pages_free"] == load["kv_pages_total"] > 0
            return everything_free and load["in_flight"] == 0 and load["queue_depth"] == 0

        self.node.until(idle, "the node is idle and its KV cache is free")

    def client(self) -> openai.OpenAI:
        """Return OpenAI's client without retries, so that tests see every failure."""
        return openai.OpenAI(http_client=openai.DefaultHttpxClient(trust_env=False), **self._client_options())

    def async_client(self) -> openai.AsyncOpenAI:
        """Return OpenAI's asynchronous client without retries."""
        return openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(trust_env=False), **self._client_options())

    def _client_options(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": TIMEOUT_SECONDS}

    def _start(self, name: str, *arguments: str) -> Server:
        server = Server(f"helexa.{name}", arguments, self._folder / f"{name}.log")
        self._servers.append(server)
        return server


def read(url: str, key: str | None = None) -> str:
    """Return the text at a URL. `key` is the API key to send."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with _direct.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as response:
        return response.read().decode()


def get(url: str, key: str | None = None) -> Any:
    """Return the JSON value at a URL. `key` is the API key to send."""
    return json.loads(read(url, key))


def post(url: str, body: object) -> tuple[int, dict[str, str], Any]:
    """Send a POST request and return status, headers and JSON value of the response.

    `body` is sent unchanged if it is bytes, otherwise as JSON.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with _direct.open(request, timeout=TIMEOUT_SECONDS) as response:
            return response.status, dict(response.headers), json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.load(error)
