"""Frames: any split of the byte stream yields the same messages, and invalid data is rejected."""

import struct

import pytest

from helexa.neuron.engine.ipc.message_and_pixel_sockets import MAX_FRAME_BYTES, FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import Cancel, Generate, SamplingParams, ToEngine

MESSAGES = [
    Generate(id=1, prompt=[1, 2, 3], max_tokens=5, sampling=SamplingParams(logit_bias={7: -1.0}), stop_ids=[2]),
    Cancel(1),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_ipc_messages_are_decoded_equally_however_the_byte_stream_is_split(size: int) -> None:
    data = b"".join(encode(message) for message in MESSAGES)
    decoder = FrameDecoder(ToEngine)
    received = [message for at in range(0, len(data), size) for message in decoder.feed(data[at : at + size])]
    assert received == MESSAGES


def test_generate_frame_with_a_cache_salt_that_is_too_long_is_rejected() -> None:
    request = Generate(id=1, prompt=[1], max_tokens=1, sampling=SamplingParams(), salt="s" * 65)
    with pytest.raises(ValueError, match="salt"):
        FrameDecoder(ToEngine).feed(encode(request))


@pytest.mark.parametrize("data", [struct.pack("<I", MAX_FRAME_BYTES + 1), struct.pack("<I", 3) + b"\xc1\xff\x00"])
def test_frame_that_is_too_large_or_not_decodable_is_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        FrameDecoder(ToEngine).feed(data)
