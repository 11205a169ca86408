"""The reasons why requests to a node fail, over real sockets."""

import asyncio
from asyncio import StreamReader, StreamWriter

import pytest

from cortex.running_gateway import open_client
from helexa.cortex.fleet.node_errors import NodeError
from ports import free_port

INVALID_HTTP = "{url} answered /health with invalid HTTP (%s); check the endpoint of the node"


async def failure(endpoint: str) -> str:
    async with open_client() as client:
        with pytest.raises(NodeError) as error:
            await client.health(endpoint)
    return str(error.value)


async def test_poll_error_names_a_refused_connection_or_an_unknown_host() -> None:
    for host in ("127.0.0.1", "localhost"):  # localhost has two addresses on many machines
        url = f"http://{host}:{free_port()}"
        assert await failure(url) == f"connection refused at {url}; check that the node runs"
    assert await failure("http://no-such-node.invalid") == (
        "the host name of http://no-such-node.invalid cannot be resolved; check the name and the DNS"
    )


@pytest.mark.parametrize(
    ("answer", "scheme", "message"),
    [
        (b"", "http", "{url} closed the connection without an answer to /health; see the node's log"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "http", INVALID_HTTP % "Expected HTTP/, RTSP/ or ICE/"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
            "http",
            "{url} closed the connection within its answer to /health; see the node's log",
        ),
        (
            b"HTTP/1.1 200 OK\r\na: %b\r\n\r\n" % (b"x" * (1 << 20)),
            "http",
            INVALID_HTTP % "the headers of the node's response exceed 65536 bytes",
        ),
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "https",
            "no TLS connection to {url}; check whether the node speaks http instead of https",
        ),
    ],
)
async def test_poll_error_names_a_server_that_is_not_a_node(answer: bytes, scheme: str, message: str) -> None:
    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        assert await failure(url) == message.format(url=url)
