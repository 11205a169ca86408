"""Send request bodies of 45 MB to a gateway, and report the longest response time of `/health`, as JSON lines.

usage: python perf/attack/large_bodies.py [--mib 45] [--at-once 4] [--routes chat responses]

The gateway, its two mock nodes and the clients run in separate processes. The script itself requests `/health` every 20
ms. It sends each kind of request body once alone, then `--at-once` times at the same moment. A JSON line has the
response statuses, the seconds until the last response, and the longest response time of `/health` in milliseconds,
which should be below 500 ms.
"""

import argparse
import encodings.idna  # noqa: F401  before the fork of clients, which copies import locks that threads hold
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

MODEL = "Org/M"
ALIAS = "small"
PATHS = {
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}
SAMPLE_SECS = 0.02
_ALLOWED_MESSAGES = 90_000  # the Messages API allows 100,000 messages
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
_USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
_CHAT = {"id": "c1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [_CHOICE], "usage": _USAGE}


class Node(BaseHTTPRequestHandler):
    """A mock node with one model. It answers every request immediately."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond([{"id": MODEL, "status": "loaded"}] if self.path == "/models" else {})

    def do_POST(self) -> None:
        left = int(self.headers["content-length"])
        while left:
            left -= len(self.rfile.read(min(left, 1 << 20)))
        self._respond({"count": 7} if self.path == "/tokenize" else _CHAT)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _respond(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve_node(port: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Node)
    port.send(server.server_address[1])
    server.serve_forever()


def bodies(size: int, routes: Iterable[str]) -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, the URL path and the content of each request body. Each body has about `size` bytes."""

    def fill(field: str, value: bytes, largest: int | None = None) -> bytes:
        count = max(size // (len(value) + 1), 1)
        values = b",".join([value] * min(count, largest or count))
        return b'{"model":"%b","max_tokens":1,"%b":[%b]}' % (ALIAS.encode(), field.encode(), values)

    tiny = b'{"role":"user","content":"x"}'
    text = b'{"role":"user","content":"%b"}' % (b"word " * (size // _ALLOWED_MESSAGES // 5))
    for route in routes:
        field = "messages" if route in ("messages", "count_tokens", "chat") else "input"
        yield "tiny messages", route, fill(field, b'"x"' if route == "embeddings" else tiny)
        yield "allowed messages", route, fill(field, b'"x y z"' if route == "embeddings" else text, _ALLOWED_MESSAGES)
        yield "one text", route, fill(field, b'{"role":"user","content":"%b"}' % (b"word " * (size // 5)), 1)
        yield "empty lists", route, fill(field, b"[]")
        yield "broken JSON", route, fill(field, b"[]")[:-2]
        yield "model names", route, fill(field, b'{"model":"small"}')


def send(port: int, path: str, body: bytes, statuses: Connection) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        statuses.send(response.status)
    except OSError as error:
        statuses.send(type(error).__name__)


def sample(port: int, ended: threading.Event, longest: list[float]) -> None:
    """Request `/health` every 20 ms until `ended` is set, and append each response time in seconds to `longest`."""
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    while not ended.is_set():
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        longest.append(time.perf_counter() - began)
        time.sleep(SAMPLE_SECS)


def measure(port: int, path: str, body: bytes, at_once: int) -> tuple[list[object], float, list[float]]:
    ended, times = threading.Event(), list[float]()
    sampler = threading.Thread(target=sample, args=(port, ended, times))
    context = multiprocessing.get_context("fork")
    began = time.perf_counter()
    sampler.start()
    waiting: list[Connection] = []
    for _ in range(at_once):
        mine, theirs = context.Pipe(duplex=False)
        context.Process(target=send, args=(port, path, body, theirs), daemon=True).start()
        waiting.append(mine)
    statuses = [pipe.recv() for pipe in waiting]
    took = time.perf_counter() - began
    ended.set()
    sampler.join()
    return statuses, took, times


@contextmanager
def processes(count: int, target: Callable[[Connection], None]) -> Iterator[list[int]]:
    """Run the server function `target` in `count` processes during the `with` block. Yield the ports of the servers."""
    context = multiprocessing.get_context("spawn")
    running, ports = [], []
    try:
        for _ in range(count):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=target, args=(theirs,), daemon=True)
            process.start()
            running.append(process)
            ports.append(mine.recv())
        yield ports
    finally:
        for process in running:
            process.kill()


@contextmanager
def gateway(folder: Path, nodes: list[int]) -> Iterator[int]:
    """Run a gateway in front of the nodes at the ports `nodes` during the `with` block. Yield the gateway's port."""
    (folder / "models.toml").write_text(f'[aliases]\n{ALIAS} = "{MODEL}"\n')
    neurons = "".join(f'[[neurons]]\nname = "n{port}"\nendpoint = "http://127.0.0.1:{port}"\n' for port in nodes)
    (folder / "cortex.toml").write_text(
        'models_config = "models.toml"\n[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n'
        f'poll_interval_secs = 1\n[ledger]\nurl = "sqlite:{folder}/cortex.db"\n{neurons}'
    )
    command = [sys.executable, "-m", "helexa.cortex", "serve", "-c", str(folder / "cortex.toml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            assert process.stderr is not None
            match = next(match for line in process.stderr if (match := re.search(r"url=http://[^:]+:(\d+) ", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield int(match[1])
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=45)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--routes", nargs="+", choices=PATHS, default=list(PATHS))
    arguments = parser.parse_args()
    worst = 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        processes(2, serve_node) as nodes,
        gateway(Path(folder), nodes) as port,
    ):
        time.sleep(2)  # the gateway polls both nodes
        for name, route, body in bodies(arguments.mib << 20, arguments.routes):
            for at_once in (1, arguments.at_once):
                statuses, took, times = measure(port, PATHS[route], body, at_once)
                worst = max(worst, *times)
                row = {"route": route, "body": name, "at_once": at_once, "statuses": statuses, "secs": round(took, 2)}
                print(json.dumps(row | {"longest_health_ms": round(max(times) * 1000)}), flush=True)
    print(json.dumps({"longest_health_ms": round(worst * 1000)}))


if __name__ == "__main__":
    main()
