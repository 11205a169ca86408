"""Open more connections than a server has file descriptors, and check that the server stays usable.

    python perf/attack/connections.py [--connections 1200] [--idle 1100] [--model helexa/small]

The script tests a gateway and a node, each with two limits on open files (soft / hard): 1,024 / 1,024 and 1,024 /
16,384. There are two attacks:

    burst   `--connections` connections send one request each, all at the same time. The gateway gets chat requests, and
            a mock node behind it responds after a second, so that all requests run together. The node gets requests for
            its list of models. Each connection must be served or receive a complete 503 response.
    idle    `--idle` connections are opened and send nothing. Then a request on a new connection must succeed. The node
            loads its model while the idle connections are open.

Each JSON line has the number of responses by status, and a recovery time. `broken` counts connections that failed
without a complete response. After a burst, the recovery time is the time from the last response of the burst to the
next response with status 200. With idle connections, it is the time of the request.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1]))

from support.gateways import cortex_config
from support.output import print_line, print_verdict, run
from support.servers import free_port, server

LIMITS = ((1024, 1024), (1024, 16384))
NODE_SECONDS = 1.0
ANSWER_SECONDS = 60.0
RECOVERY_SECONDS = 2.0
BROKEN = "broken"
MODELS = json.dumps([{"id": "m", "harness": "torch", "status": "loaded", "devices": []}]).encode()
ANSWER = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()


def request(path: str, body: object = None) -> bytes:
    """Return an HTTP request as bytes: a GET if `body` is None, else a POST with `body` as JSON."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def chat(model: str) -> bytes:
    """Return a chat request for two tokens, as bytes."""
    messages = [{"role": "user", "content": "hi"}]
    return request("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 2})


async def status_of(port: int, content: bytes) -> int | str:
    """Send the request `content` on a new connection.

    Returns:
        The status of the response, or `broken` if the response is missing or incomplete.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return BROKEN
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            writer.write(content)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        return int(head.split()[1])
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        return BROKEN
    finally:
        writer.close()


async def seconds_to_success(port: int, content: bytes) -> float:
    """Repeat the request `content` until its response has status 200. Return the seconds until this response."""
    began = time.perf_counter()
    while await status_of(port, content) != 200:
        if time.perf_counter() - began > ANSWER_SECONDS:
            raise SystemExit(f"no answer with status 200 within {ANSWER_SECONDS:.0f} s")
        await asyncio.sleep(0.02)
    return time.perf_counter() - began


async def burst(name: str, port: int, content: bytes, connections: int) -> None:
    """Send a request on many connections at the same time, then measure the recovery time and print the results.

    Args:
        name: name of the server in the output.
        port: port of the server.
        content: the HTTP request as bytes.
        connections: number of connections.
    """
    statuses = Counter(await asyncio.gather(*(status_of(port, content) for _ in range(connections))))
    seconds = await seconds_to_success(port, content)
    print_line(
        row=f"{name} burst", answers={str(status): count for status, count in statuses.items()}, recovery_s=seconds
    )
    clean = statuses[200] + statuses[503]
    print_verdict(f"{name} burst, served or a clean 503", clean, f"= {connections}", clean == connections)
    print_verdict(f"{name} burst, recovery, seconds", seconds, f"<= {RECOVERY_SECONDS}", seconds <= RECOVERY_SECONDS)


@asynccontextmanager
async def idle_connections(port: int, count: int) -> AsyncIterator[None]:
    """Keep `count` connections open during the `with` block without sending data."""
    async with AsyncExitStack() as stack:
        for _ in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
        yield


async def slow_node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Handle a connection as a mock node, which has the model `m` and responds to a chat request after one second."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length: ")[2].split(b"\r\n")[0]
            await reader.readexactly(int(length or b"0"))
            status_line, body = b"404 Not Found", b"{}"
            if head.startswith(b"get /models http"):
                status_line, body = b"200 OK", MODELS
            elif head.startswith(b"post /v1/chat"):
                await asyncio.sleep(NODE_SECONDS)
                status_line, body = b"200 OK", ANSWER
            content_type = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(b"HTTP/1.1 " + status_line + b"\r\n" + content_type + body)
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        pass
    finally:
        writer.close()


def limit(process: psutil.Process, limits: tuple[int, int]) -> None:
    """Set the soft and the hard limit on open files of a server process that has just started."""
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)


async def gateway(limits: tuple[int, int], arguments: argparse.Namespace) -> None:
    """Start a gateway, set its limits on open files (soft, hard), and run both attacks on it."""
    name, port = f"gateway {limits[0]}/{limits[1]}", free_port()
    node = await asyncio.start_server(slow_node, "127.0.0.1", 0, backlog=4096)
    with tempfile.TemporaryDirectory() as folder:
        config = cortex_config(Path(folder), port, f"http://127.0.0.1:{node.sockets[0].getsockname()[1]}")
        async with node:
            with server("helexa.cortex", "serve", "-c", str(config)) as process:
                limit(process, limits)
                await seconds_to_success(port, chat("m"))
                await burst(name, port, chat("m"), arguments.connections)
                async with idle_connections(port, arguments.idle):
                    seconds = await seconds_to_success(port, chat("m")) - NODE_SECONDS
                print_verdict(
                    f"{name} behind {arguments.idle} idle connections, seconds", seconds, "<= 10", seconds <= 10
                )


async def node(limits: tuple[int, int], arguments: argparse.Namespace) -> None:
    """Start a node, set its limits on open files (soft, hard), and run both attacks on it."""
    name, port = f"node {limits[0]}/{limits[1]}", free_port()
    with server("helexa.neuron", "--host", "127.0.0.1", "--port", str(port)) as process:
        limit(process, limits)
        await seconds_to_success(port, request("/version"))
        await burst(name, port, request("/v1/models"), arguments.connections)
        async with idle_connections(port, arguments.idle):
            load = await seconds_to_success(port, request("/models/load", {"model_id": arguments.model}))
            first = await seconds_to_success(port, chat(arguments.model.rpartition(":")[2]))
        print_line(row=f"{name} behind {arguments.idle} idle connections", load_s=load, first_request_s=first)
        print_verdict(f"{name} first request on a new model, seconds", first, "<= 10", first <= 10)


async def measure(arguments: argparse.Namespace) -> None:
    """Attack a gateway and a node with all limits on open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for limits in LIMITS:
        await gateway(limits, arguments)
    for limits in LIMITS if arguments.model else ():
        await node(limits, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1200)
    parser.add_argument("--idle", type=int, default=1100)
    parser.add_argument("--model", default="helexa/small", help="an id, a package or a path; empty for no node")
    run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
