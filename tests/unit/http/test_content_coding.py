"""Compressed request bodies: decoded in pieces, within the limits on size and memory."""

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.http import content_coding
from helexa.http.content_coding import PIECE_BYTES, BodyDecoder
from helexa.http.request_parser import body_decoder
from helexa.http.service_and_memory_budget import BodyBudget
from http_listener import Streams, body, listening, start

zstd = content_coding.zstd
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nContent-Encoding: %b\r\n\r\n%b"


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip with two members": ("gzip", lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without header": ("deflate", raw_deflate),
} | ({} if zstd is None else {"zstd": ("zstd", zstd.compress)})


def decoded(decoder: BodyDecoder, *parts: bytes) -> bytes:
    pieces: list[bytes] = []
    for part in parts:
        decoder.feed(part)
        while piece := decoder.read():
            assert len(piece) <= PIECE_BYTES
            pieces.append(piece)
    decoder.finish()
    return b"".join(pieces)


@pytest.mark.parametrize("name", ENCODERS)
@given(data=st.binary(max_size=300), size=st.integers(1, 50))
def test_compressed_body_is_decoded_from_parts_of_any_size(name: str, data: bytes, size: int) -> None:
    coding, encode = ENCODERS[name]
    encoded = encode(data)
    parts = [encoded[start : start + size] for start in range(0, len(encoded), size)]
    assert decoded(BodyDecoder(coding), *parts) == data


@pytest.mark.parametrize("name", ENCODERS)
def test_large_compressed_body_is_decoded_in_pieces(name: str) -> None:
    coding, encode = ENCODERS[name]
    assert decoded(BodyDecoder(coding), encode(bytes(5_000_000))) == bytes(5_000_000)


@pytest.mark.parametrize("name", ENCODERS)
def test_decoded_body_slightly_larger_than_one_output_piece_is_complete(name: str) -> None:
    """A decoder may hold up to 258 bytes of output after it has consumed all input."""
    coding, encode = ENCODERS[name]
    for size in range(PIECE_BYTES, PIECE_BYTES + 300):
        assert decoded(BodyDecoder(coding), encode(bytes(size))) == bytes(size)


@pytest.mark.parametrize("name", ENCODERS)
def test_incomplete_or_invalid_compressed_bodies_are_400(name: str) -> None:
    coding, encode = ENCODERS[name]
    encoded = encode(b"hello world" * 100)
    for wrong in (encoded[:-1], encoded[:4], b"{}" * 50, encoded + b"{}garbage"):
        with pytest.raises(ApiError, match=f"not valid {coding} data") as caught:
            decoded(BodyDecoder(coding), wrong)
        assert caught.value.status == 400


@pytest.mark.skipif(zstd is None, reason="the package backports.zstd is not installed")
def test_zstd_body_with_a_too_large_window_is_rejected() -> None:
    assert zstd is not None
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    wide = compressor.compress(bytes(1 << 20)) + compressor.flush()
    with pytest.raises(ApiError, match="not valid zstd data"):
        decoded(BodyDecoder("zstd"), wide)


@pytest.mark.parametrize("value", [b"br", b"gzip, gzip", b"identity", b"", b"\xff"])
def test_bodies_in_other_content_encodings_are_not_decoded(value: bytes) -> None:
    headers = [(b"content-encoding", value)]
    assert body_decoder(headers) == (None, headers)
    twice = [(b"content-encoding", b"gzip"), (b"content-encoding", b"gzip")]
    assert body_decoder(twice) == (None, twice)


async def answer_body(scope: Any, receive: Any, send: Any) -> None:
    """Respond with the length of the body and whether the application sees the encoding, or with an error's status."""
    size, more, status = 0, True, 200
    try:
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
    except ApiError as error:
        status = error.status
    names = [name for name, _ in scope["headers"]]
    content = b"%d %d" % (size, b"content-encoding" in names)
    await send({**start((b"content-length", b"%d" % len(content))), "status": status})
    await send(body(content))


async def post(streams: Streams, encoded: bytes, coding: str = "gzip") -> tuple[int, bytes]:
    streams[1].write(HEAD % (len(encoded), coding.encode(), encoded))
    head = await streams[0].readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split()[1]), await streams[0].readexactly(length)


@pytest.mark.parametrize("name", ENCODERS)
async def test_application_receives_the_decoded_body(name: str) -> None:
    coding, encode = ENCODERS[name]
    async with listening(answer_body) as (_, connect):
        streams = await connect()
        for size in (0, 1, 1_000_000):
            encoded = encode(bytes(size))
            assert await post(streams, encoded, coding) == (200, b"%d 0" % size)
        assert await post(streams, b"", coding) == (200, b"0 0")
        assert (await post(streams, encode(b"x" * 99)[:-3], coding))[0] == 400


async def test_decoded_bytes_count_towards_the_body_budget() -> None:
    bodies = BodyBudget(20 << 20)
    async with listening(answer_body, bodies=bodies) as (_, connect):
        streams = await connect()
        status, content = await post(streams, gzip.compress(bytes(100 << 20)))
        assert status == 503 and int(content.split()[0]) < 10 << 20
        assert bodies.reserved == 0
        assert (await post(await connect(), gzip.compress(bytes(5 << 20))))[0] == 200
        await asyncio.sleep(0)
        assert bodies.reserved == 0
