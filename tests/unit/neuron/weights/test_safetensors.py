import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.safetensors_checkpoint import SafetensorsCheckpoint

CONFIG = {"model_type": "llama", "hidden_size": 8}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def contents(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    with SafetensorsCheckpoint(folder) as checkpoint:
        return {name: described(checkpoint.read(name)) for name in checkpoint.names()}


def described(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(4, 4, generator=generator).bfloat16(),
        "c.bias": torch.arange(7),
    }


def test_safetensors_of_every_dtype_and_shape_are_read_unchanged(folder: Path) -> None:
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert checkpoint.config == CONFIG
        assert sorted(checkpoint.names()) == sorted(tensors)
        assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            assert checkpoint.shape(name) == tuple(tensor.shape)
            assert described(checkpoint.read(name)) == described(tensor)


def test_sharded_safetensors_model_is_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.config["hidden_size"] == 32
        assert set(checkpoint.names()) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(checkpoint.read(name), tensor)


def test_modifying_a_tensor_that_was_read_does_not_change_the_file(folder: Path) -> None:
    save_file(some_tensors(), folder / "model.safetensors")
    original = (folder / "model.safetensors").read_bytes()
    with SafetensorsCheckpoint(folder) as checkpoint:
        checkpoint.read("a.weight").zero_()
        assert torch.equal(checkpoint.read("a.weight"), some_tensors()["a.weight"])
    assert (folder / "model.safetensors").read_bytes() == original


def test_single_safetensors_file_is_found_under_any_name(folder: Path) -> None:
    save_file(some_tensors(), folder / "weights.safetensors")
    assert set(contents(folder)) == set(some_tensors())


def test_several_safetensors_files_without_an_index_are_rejected(folder: Path) -> None:
    for name in ("one", "two"):
        save_file(some_tensors(), folder / f"{name}.safetensors")
    with pytest.raises(ModelFileError, match=r"2 \.safetensors files and no model\.safetensors\.index\.json"):
        SafetensorsCheckpoint(folder)


def test_safetensors_file_truncated_at_any_byte_is_rejected(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(some_tensors(), path)
    original = path.read_bytes()
    for length in range(len(original)):
        path.write_bytes(original[:length])
        with pytest.raises(ModelFileError, match=r"^model\.safetensors: .*truncated"):
            SafetensorsCheckpoint(folder)


def test_safetensors_header_with_a_flipped_byte_causes_no_crash_or_read_beyond_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(some_tensors(), path)
    original = path.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    rejected = 0
    tracemalloc.start()
    for position in range(end):
        for mask in (0x01, 0x10, 0x80):
            path.write_bytes(original[:position] + bytes([original[position] ^ mask]) + original[position + 1 :])
            try:
                tensors = contents(folder)
            except ModelFileError as error:
                rejected += 1
                assert str(error).startswith("model.safetensors: ")
                assert str(error).isprintable()
            else:
                assert sum(len(stored) for *_, stored in tensors.values()) == len(original) - end
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rejected > end
    assert peak < 4 << 20


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


BAD_FILES = {
    "empty": (b"", "truncated"),
    "header length": (struct.pack("<Q", 2**63) + bytes(64), "truncated"),
    "not JSON": (file_of(b"{'a'}"), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON"),
    "deep JSON": (file_of(b'{"a":' + b"[" * 200_000), "not valid JSON"),
    "endless digits": (file_of(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "list": (file_of([]), "not a JSON object"),
    "twice": (file_of(b'{"a": 1, "a": 2}'), "a key appears twice"),
    "entry": (file_of({"a": 3}), "the header entry of tensor a is not a JSON object"),
    "name": (file_of({"a\nb": entry()}), "is not printable"),
    "dtype": (file_of({"a": entry(dtype="F4")}), "unsupported dtype 'F4' in tensor a"),
    "dtype list": (file_of({"a": entry(dtype=["F32"] * 99)}), "unsupported dtype"),
    "no shape": (file_of({"a": entry(shape=None)}), "invalid shape"),
    "negative shape": (file_of({"a": entry(shape=[-2])}), "invalid shape"),
    "fractional shape": (file_of({"a": entry(shape=[2.0])}), "invalid shape"),
    "boolean shape": (file_of({"a": entry(shape=[True, 2])}), "invalid shape"),
    "huge shape": (file_of({"a": entry(shape=[2**62, 4, 0])}), "invalid shape"),
    "many dimensions": (file_of({"a": entry(shape=[1] * 64)}), "invalid shape"),
    "three offsets": (file_of({"a": entry(offsets=[0, 4, 8])}), "data_offsets"),
    "offsets reversed": (file_of({"a": entry(offsets=[8, 0])}), "data_offsets"),
    "negative offset": (file_of({"a": entry(offsets=[-8, 0])}), "data_offsets"),
    "size mismatch": (file_of({"a": entry(shape=[3])}), "tensor a of 12 bytes has data_offsets of 8 bytes"),
    "beyond": (file_of({"a": entry(shape=[4], offsets=[0, 16])}), "the tensor data is truncated"),
    "hole at the start": (file_of({"a": entry(shape=[1], offsets=[4, 8])}), "does not begin where"),
    "overlap": (file_of({"a": entry(), "b": entry()}), "does not begin where"),
    "trailing bytes": (file_of({"a": entry(shape=[1], offsets=[0, 4])}), "bytes follow the last tensor"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_invalid_safetensors_file_is_rejected_with_the_reason(case: str, folder: Path) -> None:
    content, problem = BAD_FILES[case]
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        SafetensorsCheckpoint(folder)
    assert str(caught.value).startswith("model.safetensors: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(caught.value.problem) < 200


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/secret.safetensors",
        "..\\x.safetensors",
        "config.json",
        "",
    ],
)
def test_safetensors_index_cannot_refer_to_files_outside_its_folder(folder: Path, shard: str) -> None:
    inside = folder / "inside"
    (inside / "sub").mkdir(parents=True)
    save_file(some_tensors(), folder / "secret.safetensors")
    save_file(some_tensors(), inside / "sub" / "secret.safetensors")
    (inside / "config.json").write_text("{}")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    with pytest.raises(ModelFileError, match=r"is not a plain name of a \.safetensors file"):
        SafetensorsCheckpoint(inside)


def test_safetensors_shard_may_be_a_symbolic_link(folder: Path) -> None:
    save_file(some_tensors(), folder / "blob")
    snapshot = folder / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(Path("..") / "blob")
    assert set(contents(snapshot)) == set(some_tensors())


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({}, "weight_map is missing"),
        ({"weight_map": ["model.safetensors"]}, "weight_map is missing"),
        ({"weight_map": {"a.weight": 3}}, "does not name files"),
        ({"weight_map": {"a.weight": "part-2.safetensors"}}, "part-2.safetensors: cannot be read"),
        ({"weight_map": {"d.weight": "part-1.safetensors"}}, "part-1.safetensors: the file has no tensor 'd.weight'"),
    ],
)
def test_invalid_safetensors_index_is_rejected(folder: Path, index: dict[str, Any], problem: str) -> None:
    save_file(some_tensors(), folder / "part-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError) as caught:
        SafetensorsCheckpoint(folder)
    assert problem in str(caught.value)


def test_oversized_safetensors_header_or_config_is_rejected_without_being_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    with path.open("wb") as file:  # a sparse file uses no disk space
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(2 << 30)
    with pytest.raises(ModelFileError, match=r"^model\.safetensors: the header is larger than 32 MiB; "):
        SafetensorsCheckpoint(folder)
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelFileError, match=r"^config\.json: the file is larger than the limit of 4 MiB; "):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: None, r"^config\.json: cannot be read: No such file"),
        (lambda path: path.write_text("{"), r"^config\.json: the file is not valid JSON"),
        (lambda path: path.write_text("[]"), r"^config\.json: the file is not a JSON object"),
    ],
)
def test_missing_or_malformed_config_json_is_rejected_with_the_reason(
    tmp_path: Path, write: Callable[[Path], object], problem: str
) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors")
    write(tmp_path / "config.json")
    with pytest.raises(ModelFileError, match=problem):
        SafetensorsCheckpoint(tmp_path)


def test_error_for_a_missing_safetensors_tensor_names_the_tensor(folder: Path) -> None:
    save_file(some_tensors(), folder / "model.safetensors")
    with SafetensorsCheckpoint(folder) as checkpoint:
        for method in (checkpoint.read, checkpoint.shape):
            with pytest.raises(ModelFileError, match=r"no tensor lm_head\.weight; "):
                method("lm_head.weight")


def test_safetensors_file_that_shrinks_after_opening_is_rejected(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(some_tensors(), path)
    with SafetensorsCheckpoint(folder) as checkpoint:
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ModelFileError, match="changed on disk"):
            checkpoint.read("a.weight")


def test_safetensors_file_that_shrinks_between_reads_is_rejected(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(some_tensors(), path)
    with SafetensorsCheckpoint(folder) as checkpoint:
        for name in checkpoint.names():
            checkpoint.read(name)
        with path.open("r+b") as file:
            file.truncate(len(path.read_bytes()) - 1)
        with pytest.raises(ModelFileError, match="changed on disk"):
            checkpoint.read("a.weight")
