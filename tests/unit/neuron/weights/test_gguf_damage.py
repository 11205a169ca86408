"""Damaged and hostile GGUF files: each file loads or is rejected with a reason, and uses little memory."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor
from neuron.weights.hf_to_gguf import write_model
from neuron.weights.test_gguf_families import FAMILIES, tiny
from nightly import daily

CASES = 150
NUMBERS = [0, 1, 2, 3, 8, 9, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def some_strings(writer: gguf.GGUFWriter) -> None:
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "d" * 30])
    writer.add_bos_token_id(1)


def damaged(original: bytes, header: int, chance: random.Random) -> bytes:
    """Return `original` with up to four random changes, most of them in the header; truncate 5% of the results."""
    content = bytearray(original)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at = chance.randrange(4, header) if chance.random() < 0.95 else chance.randrange(len(content))
        kind = chance.choice(["flip", "flip", "set", "set", "number", "count", "cut", "insert"])
        length = chance.choice([1, 4, 8, 16])
        if kind == "flip":
            content[at] ^= 1 << chance.randrange(8)
        elif kind == "set":
            content[at] = chance.randrange(256)
        elif kind == "number":
            content[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS))
        elif kind == "count":
            content[at : at + 4] = struct.pack("<I", chance.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == "cut":
            del content[at : at + length]
        else:
            content[at:at] = chance.randbytes(length)
    return bytes(content[: chance.randrange(len(content))] if chance.random() < 0.05 else content)


OFTEN = ("llama", "qwen3_5_text", "gemma3_text", "gpt_oss")


@pytest.mark.parametrize("kind", daily(OFTEN, (kind for kind in FAMILIES if kind != "glm4_moe_lite")))
def test_damaged_gguf_files_load_or_are_rejected_without_a_crash(kind: str, tmp_path: Path) -> None:
    original = write_model(tmp_path / "original.gguf", *tiny(kind), some_strings).read_bytes()
    header = min(int(tensor.data_offset) for tensor in gguf.GGUFReader(tmp_path / "original.gguf").tensors)
    path, chance, rejected = tmp_path / "damaged.gguf", random.Random(29), 0
    for _ in range(CASES):
        path.write_bytes(damaged(original, header, chance))
        tracemalloc.start()
        try:
            with GgufCheckpoint(path) as checkpoint:
                for name in checkpoint.names():
                    assert checkpoint.read(name).shape == checkpoint.shape(name)
        except ModelFileError as error:
            rejected += 1
            assert str(error).isprintable()
            assert len(str(error)) < 2000
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 << 20
    assert CASES // 3 < rejected < CASES


def test_random_bytes_as_gguf_blocks_decode_to_weights(write_gguf: Callable[..., Path]) -> None:
    """Every bit pattern of every block type decodes to weights, which may be infinite."""
    generator = np.random.default_rng(6)
    for kind in GGMLQuantizationType:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        if elements == 1 or kind == GGMLQuantizationType.Q8_1:
            continue
        blocks = generator.integers(0, 256, (32, 1024 // elements * size), dtype=np.uint8)
        path = write_gguf("qwen2", {"output.weight": (blocks, kind)}, smallest)
        with GgufCheckpoint(path) as checkpoint:
            weight = checkpoint.read("lm_head.weight")
        assert isinstance(weight, GroupwiseTensor)
        assert weight.dequantize().shape == checkpoint.shape("lm_head.weight") == (32, 1024)
        assert int(weight.codes.max()) < 2**weight.bits


def smallest(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(32)


@pytest.mark.parametrize("length", [2000, 1 << 20])
def test_very_long_tensor_names_do_not_appear_in_error_messages(write_gguf: Callable[..., Path], length: int) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        smallest(writer)
        writer.add_string("qwen2.rope.scaling.type", "y" * length)

    with pytest.raises(ModelFileError, match=r"^model\.gguf: general\.architecture is missing or not a name; "):
        GgufCheckpoint(write_gguf("x" * length))
    with pytest.raises(
        ModelFileError, match=r"^model\.gguf: key qwen2\.rope\.scaling\.type is not a short printable text; "
    ):
        GgufCheckpoint(write_gguf("qwen2", {"output.weight": np.ones((2, 2), np.float32)}, keys))
