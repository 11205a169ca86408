import random
import struct
import subprocess
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf import header_and_metadata_reader as gguf_header
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.ggml_type import GgmlType
from helexa.neuron.weights.gguf.header_and_metadata_reader import StringArray
from helexa.neuron.weights.gguf.typed_metadata_and_token_types import suppressed_tokens

WriteGguf = Callable[..., Path]

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def some_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -3)
    writer.add_uint16("a.uint16", 60_000)
    writer.add_int16("a.int16", -30_000)
    writer.add_uint32("a.uint32", 4_000_000_000)
    writer.add_int32("a.int32", -2_000_000_000)
    writer.add_uint64("a.uint64", 2**63)
    writer.add_key_value("a.int64", -(2**62), gguf.GGUFValueType.INT64)
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.true", True)
    writer.add_bool("a.false", False)
    writer.add_string("a.text", "naïve 語 🙂")
    writer.add_array("a.words", ["", "a", "Ġthe", "語"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.fractions", [0.25, -1.5])
    writer.add_array("a.flags", [True, False])


VALUES = {
    "a.uint8": 200,
    "a.int8": -3,
    "a.uint16": 60_000,
    "a.int16": -30_000,
    "a.uint32": 4_000_000_000,
    "a.int32": -2_000_000_000,
    "a.uint64": 2**63,
    "a.int64": -(2**62),
    "a.float32": 0.5,
    "a.float64": 0.1,
    "a.true": True,
    "a.false": False,
    "a.text": "naïve 語 🙂",
    "a.words": ["", "a", "Ġthe", "語"],
    "a.numbers": [1, -2, 3],
    "a.fractions": [0.25, -1.5],
    "a.flags": [True, False],
}


@pytest.fixture
def small(write_gguf: WriteGguf) -> Path:
    generator = np.random.default_rng(3)
    return write_gguf(
        "llama",
        {
            "one": generator.normal(size=(5,)).astype(np.float32),
            "two.weight": (generator.normal(size=(3, 64)).astype(np.float32), Q8_0),
            "three": generator.normal(size=(2, 4)).astype(np.float16),
        },
        some_keys,
    )


def loaded(path: Path) -> tuple[dict[str, Any], dict[str, tuple[object, bytes]]]:
    file = GgufFile.open(path)
    try:
        tensors = {name: (tensor, file.read(name).tobytes()) for name, tensor in file.tensors.items()}
    finally:
        file.close()
    return file.metadata, tensors


def test_gguf_metadata_values_of_each_type_are_read(small: Path) -> None:
    file = GgufFile.open(small)
    assert file.version == 3
    assert file.architecture == "llama"
    assert file.metadata == {"general.architecture": "llama"} | VALUES
    types = {key: type(value) for key, value in ({"general.architecture": ""} | VALUES).items()}
    assert {key: type(value) for key, value in file.metadata.items()} == types | {"a.words": StringArray}


def test_gguf_tensor_table_and_bytes_equal_those_of_the_reference_reader(small: Path) -> None:
    file = GgufFile.open(small)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(small).tensors}
    assert list(file.tensors) == list(reference)
    for name, tensor in file.tensors.items():
        assert tensor.name == name
        assert tensor.type == GgmlType[reference[name].tensor_type.name]
        assert tensor.shape == tuple(int(size) for size in reversed(reference[name].shape))
        assert tensor.offset == reference[name].data_offset
        assert tensor.nbytes == reference[name].n_bytes
        stored = file.read(name)
        assert stored.dtype == np.uint8
        assert stored.flags.writeable
        assert stored.tobytes() == reference[name].data.tobytes()
    file.close()


def test_metadata_of_a_real_gguf_file_equals_that_of_the_reference_reader(
    smollm2_gguf: Path, smollm2_reference: gguf.GGUFReader
) -> None:
    metadata = GgufFile.open(smollm2_gguf).metadata
    fields = smollm2_reference.fields
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert metadata == {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def test_vocabulary_strings_are_decoded_only_if_tokens_are_marked_as_unused() -> None:
    tokens = StringArray(text(b"\xff") * 3, array("q", [9, 18, 27]), "model.gguf")
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 1]}
    assert suppressed_tokens(metadata, 5) == [3, 4]
    with pytest.raises(ModelFileError, match="is not valid UTF-8"):
        suppressed_tokens(metadata | {"tokenizer.ggml.token_type": [1, 3, 5]}, 5)


def test_string_array_with_strings_longer_than_one_read_is_read_unchanged(write_gguf: WriteGguf) -> None:
    words = ["a" * 70_000, "", "語" * 50_000, "b"] * 3
    path = write_gguf(
        "llama",
        {"one": np.zeros(8, np.float32)},
        lambda writer: (writer.add_array("a.words", words), writer.add_string("a.last", "end")),
    )
    metadata = GgufFile.open(path).metadata
    assert metadata["a.words"] == words
    assert metadata["a.last"] == "end"


@pytest.mark.parametrize("odd", [0, 0.001, 0.1, 1])
def test_string_array_with_empty_and_long_strings_and_zero_bytes_is_read_unchanged(
    write_gguf: WriteGguf, odd: float
) -> None:
    chance = random.Random(3)
    odd_ones = ["", "\0" * 9, "\5" + "\0" * 7, "\0" * 8 + "b", "a" * 255, "a" * 256, "a" * 3000, "語\0" * 70]
    words = [
        chance.choice(odd_ones) if chance.random() < odd else "abcdefg"[: chance.randrange(1, 8)] for _ in range(30_000)
    ]
    path = write_gguf(
        "llama",
        {"one": np.zeros(8, np.float32)},
        lambda writer: (writer.add_array("a.words", words), writer.add_string("a.last", "end")),
    )
    metadata = GgufFile.open(path).metadata
    assert metadata["a.words"] == words
    assert metadata["a.words"].some([0, 7, 29_999]) == [words[0], words[7], words[-1]]
    assert metadata["a.last"] == "end"


def test_array_of_short_or_unusual_strings_is_read_without_a_search_for_each_string(
    write_gguf: WriteGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search takes 0.1 ms. With one for each string, a small file delayed all reads of a folder for seconds."""
    searches = 0

    def counted(data: bytearray, position: int, start: int) -> Any:
        nonlocal searches
        searches += 1
        return search(data, position, start)

    search = gguf_header._ends_of_short_strings
    monkeypatch.setattr(gguf_header, "_ends_of_short_strings", counted)
    single, empty = [["word"]] * 1000, [[""] * 1500] * 20
    path = write_gguf(
        "llama",
        {"one": np.zeros(8, np.float32)},
        lambda writer: (writer.add_array("a.single", single), writer.add_array("a.empty", empty)),
    )
    metadata = GgufFile.open(path).metadata
    assert (metadata["a.single"], metadata["a.empty"]) == (single, empty)
    assert searches < 50


def test_string_that_is_not_utf8_is_rejected_when_the_array_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    words = struct.pack("<IQ", 8, 2) + text(b"good") + text(b"\xff\xfe")
    path.write_bytes(header(keys=1, body=entry(b"a.words", 9, words)))
    array = GgufFile.open(path).metadata["a.words"]
    assert len(array) == 2
    with pytest.raises(ModelFileError, match=r"^bad\.gguf: key a\.words: the text is not valid UTF-8; "):
        list(array)


def test_reading_gguf_headers_does_not_import_torch() -> None:
    program = "import sys, helexa.neuron.weights.gguf.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_gguf_file_truncated_at_any_byte_is_rejected(small: Path, tmp_path: Path) -> None:
    original = small.read_bytes()
    last = max(tensor.offset + tensor.nbytes for tensor in GgufFile.open(small).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(last):
        cut.write_bytes(original[:length])
        with pytest.raises(ModelFileError, match=r"^cut\.gguf: .*(truncated|not a GGUF file)"):
            GgufFile.open(cut)
    cut.write_bytes(original[:last])  # only the padding after the last tensor is missing
    assert loaded(cut) == loaded(small)


def test_gguf_header_with_a_flipped_byte_causes_no_crash_and_no_read_beyond_the_file(
    small: Path, tmp_path: Path
) -> None:
    original = small.read_bytes()
    header = min(tensor.offset for tensor in GgufFile.open(small).tensors.values())
    damaged = tmp_path / "damaged.gguf"
    rejected = 0
    tracemalloc.start()
    for position in range(header):
        for mask in (0x01, 0x80, 0xFF):
            damaged.write_bytes(original[:position] + bytes([original[position] ^ mask]) + original[position + 1 :])
            try:
                _, tensors = loaded(damaged)
            except ModelFileError as error:
                rejected += 1
                assert str(error).startswith("damaged.gguf: ")
                assert str(error).isprintable()
            else:
                assert sum(len(stored) for _, stored in tensors.values()) <= 3 * len(original)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rejected > header
    assert peak < 4 << 20


def header(tensors: int = 0, keys: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def row(name: bytes = b"t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(6)) + struct.pack("<IQ", 0, 0)

BAD_HEADERS = {
    "empty": (b"", "truncated"),
    "magic": (b"GGML" + bytes(60), "not a GGUF file"),
    "version 1": (header(version=1), "version 1 "),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "byte order"),
    "tensor count": (header(tensors=2**60), "claims 1152921504606846976 tensors"),
    "key count": (header(keys=2**60), "claims 1152921504606846976 keys"),
    "key length": (header(keys=1, body=struct.pack("<Q", 2**63)), "metadata key 0: the name is"),
    "key text": (header(keys=1, body=entry(b"\xff\xfe", 0, b"\0")), "not valid UTF-8"),
    "key line break": (header(keys=1, body=entry(b"a\nb", 0, b"\0")), "not printable"),
    "key twice": (header(keys=2, body=entry(b"k", 0, b"\1") * 2), "key k: the key appears twice"),
    "value type": (header(keys=1, body=entry(b"k", 13, bytes(64))), "key k: unknown value type 13"),
    "string length": (header(keys=1, body=entry(b"k", 8, struct.pack("<Q", 2**63))), "key k: the file is truncated"),
    "string text": (header(keys=1, body=entry(b"k", 8, text(b"\xff"))), "key k: the text is not valid UTF-8"),
    "array count": (header(keys=1, body=entry(b"k", 9, struct.pack("<IQ", 4, 2**61))), "key k: an array of"),
    "array length": (header(keys=1, body=entry(b"k", 9, struct.pack("<IQ", 4, 2**20))), "key k: the file is truncated"),
    "array of strings": (
        header(keys=1, body=entry(b"k", 9, struct.pack("<IQ", 8, 2**20))),
        "key k: the file is truncated",
    ),
    "array type": (header(keys=1, body=entry(b"k", 9, struct.pack("<IQ", 99, 1))), "unknown value type 99"),
    "array depth": (header(keys=1, body=entry(b"k", 9, NESTED)), "key k: arrays are nested too deep"),
    "arrays together": (
        header(keys=1, body=entry(b"k", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 2**22))),
        "an array of 4194304 elements is too long",
    ),
    "array of arrays": (
        header(keys=1, body=entry(b"k", 9, struct.pack("<IQ", 9, 2**20) + struct.pack("<IQ", 0, 0) * 9)),
        "an array of 1048576 arrays is too long",
    ),
    "arrays of arrays": (
        header(
            keys=1,
            body=entry(
                b"k",
                9,
                struct.pack("<IQ", 9, 2**8) + (struct.pack("<IQ", 9, 2**8) + struct.pack("<IQ", 0, 0) * 2**8) * 2**8,
            ),
        ),
        "an array of 256 arrays is too long",
    ),
    "shared bytes": (
        header(tensors=2, body=row(b"one", (16,)) + row(b"two", (8,), offset=32) + bytes(512)),
        "tensor two: the tensor shares bytes with tensor one",
    ),
    "the same bytes": (
        header(tensors=2, body=row(b"one", (8,)) + row(b"two", (8,)) + bytes(512)),
        "tensor two: the tensor shares bytes with tensor one",
    ),
    "alignment zero": (header(keys=1, body=entry(b"general.alignment", 4, bytes(4))), "power of two"),
    "alignment 48": (header(keys=1, body=entry(b"general.alignment", 4, struct.pack("<I", 48))), "power of two"),
    "alignment text": (header(keys=1, body=entry(b"general.alignment", 8, text(b"32"))), "power of two"),
    "no dimension": (header(tensors=1, body=row(shape=())), "tensor t: the tensor has 0 dimensions"),
    "dimensions": (header(tensors=1, body=row(shape=(1,) * 5)), "tensor t: the tensor has 5 dimensions"),
    "dimension zero": (header(tensors=1, body=row(shape=(0, 4))), "tensor t: the tensor has an empty dimension"),
    "shape overflow": (
        header(tensors=1, body=row(shape=(2**63, 2**62, 8)) + bytes(512)),
        "tensor t: the file is truncated",
    ),
    "wrapped size": (header(tensors=1, body=row(shape=(2**32, 2**32)) + bytes(512)), "tensor t: the file is truncated"),
    "offset": (header(tensors=1, body=row(offset=2**63) + bytes(512)), "tensor t: the file is truncated"),
    "wrapped offset": (header(tensors=1, body=row(offset=2**64 - 32) + bytes(512)), "tensor t: the file is truncated"),
    "alignment": (
        header(tensors=1, body=row(offset=4) + bytes(512)),
        "offset of the tensor, 4, is not a multiple of the alignment, 32",
    ),
    "unknown type": (
        header(tensors=1, body=row(kind=4242) + bytes(512)),
        "tensor t: the tensor has the unknown type 4242",
    ),
    "dropped type": (header(tensors=1, body=row(kind=31) + bytes(512)), "the type Q4_0_4_4, which is not supported"),
    "part of a block": (
        header(tensors=1, body=row(shape=(48,), kind=8) + bytes(512)),
        "do not divide into Q8_0 blocks of 32",
    ),
    "tensor twice": (header(tensors=2, body=row() * 2 + bytes(512)), "tensor t: the tensor appears twice"),
    "tensor name": (header(tensors=1, body=row(name=b"")), "the name is empty"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_invalid_gguf_header_is_rejected_with_a_reason_and_little_memory(case: str, tmp_path: Path) -> None:
    content, problem = BAD_HEADERS[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(caught.value).startswith("bad.gguf: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert peak < 4 << 20


def test_oversized_gguf_header_is_rejected_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:  # a sparse file uses no disk space
        file.write(header(keys=1, body=entry(b"k", 8, struct.pack("<Q", 1 << 30))))
        file.truncate(2 << 30)
    with pytest.raises(ModelFileError, match=r"^sparse\.gguf: key k: the header is larger than 128 MiB; "):
        GgufFile.open(path)


def test_gguf_file_of_version_2_is_read(small: Path, tmp_path: Path) -> None:
    original = small.read_bytes()
    older = tmp_path / "older.gguf"
    older.write_bytes(original[:4] + struct.pack("<I", 2) + original[8:])
    assert GgufFile.open(older).version == 2
    assert loaded(older) == loaded(small)


def test_custom_alignment_of_a_gguf_file_is_used(write_gguf: WriteGguf) -> None:
    def align(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(256)

    values = np.arange(6, dtype=np.float32)
    path = write_gguf("llama", {"a": values, "b": values + 1}, align)
    file = GgufFile.open(path)
    assert [tensor.offset % 256 for tensor in file.tensors.values()] == [0, 0]
    assert file.read("b").view(np.float32).tolist() == (values + 1).tolist()
    file.close()


def test_error_for_a_tensor_missing_in_a_gguf_file_names_the_file_and_tensor(small: Path) -> None:
    with pytest.raises(ModelFileError, match=r"^model\.gguf: the file has no tensor four; "):
        GgufFile.open(small).read("four")


def test_gguf_file_that_shrinks_after_opening_raises_an_error(small: Path) -> None:
    shorter = small.read_bytes()[:-64]
    with closing(GgufFile.open(small)) as file, pytest.raises(ModelFileError, match="changed on disk"):
        small.write_bytes(shorter)
        file.read("one")


def test_gguf_file_deleted_after_opening_raises_an_error(small: Path) -> None:
    file = GgufFile.open(small)
    small.unlink()
    with pytest.raises(ModelFileError, match="cannot read tensor one: No such file"):
        file.read("one")


def test_missing_file_or_folder_raises_model_file_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufFile.open(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GgufFile.open(tmp_path)


def test_error_for_a_gguf_file_without_the_architecture_key_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    path.write_bytes(header())
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        _ = GgufFile.open(path).architecture
