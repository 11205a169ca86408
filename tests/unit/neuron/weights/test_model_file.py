"""Special files in place of a model's files: each reader rejects them without waiting."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.model_path_and_digest import model_digest
from helexa.neuron.lifecycle.inspection import describe
from helexa.neuron.processes.file_locks_and_threads import is_used, mark_used
from helexa.neuron.text.settings_and_sampling_defaults import TemplateSources, read_object
from helexa.neuron.text.tokenizer_json import read_tokenizer_json
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.model_file import open_model_file, read_json, read_model_file
from helexa.neuron.weights.safetensors_shards import file_tensors

READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("config.json", lambda folder: read_json(folder / "config.json")),
    ("config.json", lambda folder: read_object(folder / "config.json")),
    ("model.gguf", lambda folder: GgufFile.open(folder / "model.gguf")),
    ("model.gguf", model_digest),
    ("model.safetensors", file_tensors),
    ("model.safetensors.index.json", file_tensors),
    ("tokenizer.json", lambda folder: read_tokenizer_json(folder / "tokenizer.json")),
]


@pytest.mark.parametrize(("name", "read"), READERS)
def test_fifo_in_place_of_a_model_file_is_rejected_without_waiting(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelFileError, match=f"{name} is not a regular file"):
        read(tmp_path)


def test_fifo_in_place_of_a_chat_template_file_is_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat_template.jinja")
    assert TemplateSources.in_directory(tmp_path).default is None


def test_description_of_a_folder_whose_weight_file_is_a_fifo_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="not a regular file"):
        describe(tmp_path)


def test_folder_socket_or_device_in_place_of_a_model_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for path in (tmp_path, tmp_path / "socket", Path("/dev/zero"), tmp_path / "link"):
            with pytest.raises(ModelFileError, match="not a regular file"):
                open_model_file(path)


def test_regular_file_is_read_up_to_the_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    assert read_model_file(path, 1 << 20) == b"x" * (1 << 20)
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ModelFileError, match="file is larger than 1 MiB"):
        read_model_file(path, 1 << 20)
    with pytest.raises(FileNotFoundError):
        open_model_file(tmp_path / "missing")


def test_marking_a_fifo_as_a_used_model_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    assert not is_used(tmp_path / "model.gguf")
    mark_used(tmp_path / "model.gguf")
