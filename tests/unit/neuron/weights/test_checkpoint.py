import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor


def test_folder_with_a_gguf_file_opens_like_the_file(smollm2_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2_gguf)
    with open_checkpoint(smollm2_gguf) as file, open_checkpoint(tmp_path) as folder:
        assert file.names() == folder.names()
        assert file.config == folder.config
        assert isinstance(folder.read("model.layers.3.mlp.up_proj.weight"), GroupwiseTensor)


def test_safetensors_files_in_a_folder_are_preferred_over_gguf(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "also.gguf").write_bytes(b"")
    checkpoint: Checkpoint = open_checkpoint(tmp_path)
    with checkpoint:
        assert checkpoint.names() == ["a"]
        assert checkpoint.config == {"model_type": "llama"}


def test_closing_a_checkpoint_closes_its_file(smollm2_gguf: Path) -> None:
    def open_handles() -> int:
        return sum(Path(file.path) == smollm2_gguf.resolve() for file in psutil.Process().open_files())

    handles_before = open_handles()
    with open_checkpoint(smollm2_gguf) as checkpoint:
        checkpoint.read("model.norm.weight")
        assert open_handles() == handles_before + 1
    assert open_handles() == handles_before


def test_path_without_model_is_rejected_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"missing: no such file or folder; check the path of the model$"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(
        ModelFileError,
        match=r"nor \.gguf files; download the model again, or use another file of it$",
    ):
        open_checkpoint(tmp_path)
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"2 \.gguf files; give the path of one of them$"):
        open_checkpoint(tmp_path)


def test_path_of_a_single_file_that_is_not_gguf_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ModelFileError, match=r"^model\.safetensors: header: the file is not a GGUF file; download "):
        open_checkpoint(path)
    shutil.copy(path, tmp_path / "model.bin")
    with pytest.raises(ModelFileError, match=r"^model\.bin: header: the file is not a GGUF file; download "):
        open_checkpoint(tmp_path / "model.bin")
