"""GGUF models in several files, as llama.cpp and its converter split them."""

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
import torch

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.checkpoint import open_checkpoint
from helexa.neuron.weights.gguf.files import GgufFile, gguf_models

TENSORS = {
    "token_embd.weight": np.arange(320, dtype=np.float32).reshape(10, 32),
    "output_norm.weight": np.arange(32, dtype=np.float32),
    "blk.0.attn_norm.weight": -np.arange(32, dtype=np.float32),
    "blk.0.ffn_norm.weight": np.ones(32, np.float32),
    "blk.0.ffn_up.weight": np.arange(2048, dtype=np.float32).reshape(64, 32),
}
NAMES = [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, values in TENSORS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    return tmp_path


def change(path: Path, key: str, old: int, new: int, layout: str) -> None:
    """Replace the value `old` of a metadata key by `new` in the file."""
    stored = path.read_bytes()
    place = re.escape(key.encode()) + b".{4}" + re.escape(struct.pack(layout, old))
    (match,) = re.finditer(place, stored, re.DOTALL)
    size = struct.calcsize(layout)
    path.write_bytes(stored[: match.end() - size] + struct.pack(layout, new) + stored[match.end() :])


def test_first_part_or_folder_of_a_split_gguf_opens_the_full_model(folder: Path) -> None:
    for path in (folder / NAMES[0], folder):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config["hidden_size"] == 32
            assert checkpoint.total_bytes == sum(values.nbytes for values in TENSORS.values())
            assert torch.equal(
                checkpoint.read("model.layers.0.mlp.up_proj.weight"), torch.from_numpy(TENSORS["blk.0.ffn_up.weight"])
            )
            assert len(checkpoint.names()) == len(TENSORS)


def test_tensors_of_a_split_gguf_are_read_from_their_parts_and_close_closes_all(folder: Path) -> None:
    file = GgufFile.open(folder / NAMES[0])
    assert list(file.tensors) == list(TENSORS)
    for name, values in TENSORS.items():
        assert file.read(name).tobytes() == values.tobytes()
    file.close()
    assert not [handle.path for handle in psutil.Process().open_files() if Path(handle.path).parent == folder]


def test_error_for_opening_a_later_part_names_the_first_part(folder: Path) -> None:
    problem = (
        r"^tiny-00002-of-00003\.gguf: the file is part 2 of 3, not the first part; open tiny-00001-of-00003\.gguf$"
    )
    with pytest.raises(ModelFileError, match=problem):
        GgufFile.open(folder / NAMES[1])


@pytest.mark.parametrize("number", [1, 2])
def test_error_names_the_missing_part_of_a_split_gguf(folder: Path, number: int) -> None:
    (folder / NAMES[number]).unlink()
    with pytest.raises(
        ModelFileError,
        match=f"^{NAMES[number]}: the file is missing; it is part {number + 1} of 3 of the model; download the file$",
    ):
        open_checkpoint(folder)


def test_renamed_first_part_of_a_split_gguf_is_rejected(folder: Path) -> None:
    shutil.copy(folder / NAMES[0], folder / "model.gguf")
    with pytest.raises(
        ModelFileError, match=r"one of 3 parts, so its name must end in -of-00003\.gguf; rename the file$"
    ):
        GgufFile.open(folder / "model.gguf")


def test_error_names_the_damaged_part_of_a_split_gguf(folder: Path) -> None:
    (folder / NAMES[2]).write_bytes((folder / NAMES[2]).read_bytes()[:-96])
    with pytest.raises(ModelFileError, match=f"^{NAMES[2]}: tensor blk.0.ffn_up.weight: the file is truncated"):
        open_checkpoint(folder)


def test_part_of_a_split_gguf_with_the_wrong_number_is_rejected(folder: Path) -> None:
    change(folder / NAMES[1], "split.no", 1, 2, "<H")
    with pytest.raises(ModelFileError, match=f"^{NAMES[1]}: its header does not say that it is part 2 of 3; "):
        open_checkpoint(folder)


def test_tensor_in_two_parts_of_a_split_gguf_is_rejected(folder: Path) -> None:
    shutil.copy(folder / NAMES[1], folder / NAMES[2])
    change(folder / NAMES[2], "split.no", 1, 2, "<H")
    with pytest.raises(
        ModelFileError, match=f"^{NAMES[2]}: tensor blk.0.attn_norm.weight is in an earlier part as well"
    ):
        open_checkpoint(folder)


def test_split_gguf_with_a_wrong_tensor_count_is_rejected(folder: Path) -> None:
    change(folder / NAMES[0], "split.tensors.count", 5, 6, "<i")
    with pytest.raises(
        ModelFileError, match=f"^{NAMES[0]}: the parts hold 5 tensors, expected 6; download them again$"
    ):
        open_checkpoint(folder)


def test_part_count_of_a_split_gguf_that_is_not_a_number_is_rejected(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf("llama", {}, lambda writer: writer.add_string("split.count", "3"))
    with pytest.raises(ModelFileError, match=r"^model\.gguf: key split\.count is .*, expected a whole number; "):
        GgufFile.open(path)


def test_gguf_model_list_has_single_files_and_first_parts_but_no_companion_files(folder: Path) -> None:
    companions = ("mmproj-tiny.gguf", "tiny.mmproj-Q8_0.gguf", "mtp-tiny-Q8_0.gguf", "tiny-imatrix.gguf")
    for name in ("other.gguf", *companions, "notes.txt", "half-00002-of-00002.gguf"):
        (folder / name).write_bytes(b"")
    names = [path.name for path in gguf_models(folder)]
    assert names == ["half-00002-of-00002.gguf", "other.gguf", NAMES[0]]
