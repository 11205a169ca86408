"""Paths of models that other hosts find in their own folders."""

from pathlib import Path

import msgspec
import pytest

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.model_path_and_digest import ModelPath


def on_other_host(path: ModelPath) -> ModelPath:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(path), type=ModelPath)


@pytest.mark.parametrize(("variable", "folder"), [("HELEXA_CACHE", "cache"), ("HOME", "home")])
def test_model_is_found_in_the_cache_folder_of_the_other_host(
    variable: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in ("a", "b"):
        model = tmp_path / host / folder / "models" / "tiny.gguf"
        model.parent.mkdir(parents=True)
        model.touch()
    monkeypatch.setenv(variable, str(tmp_path / "a" / folder))
    path = ModelPath.of(tmp_path / "a" / folder / "models" / "tiny.gguf")
    monkeypatch.setenv(variable, str(tmp_path / "b" / folder))
    assert on_other_host(path).find() == tmp_path / "b" / folder / "models" / "tiny.gguf"


def test_model_outside_the_cache_folders_is_found_at_the_same_path_on_the_other_host(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.touch()
    assert on_other_host(ModelPath.of(model)).find() == model


def test_error_for_a_model_missing_on_the_other_host_is_one_line(tmp_path: Path) -> None:
    path = ModelPath.of(tmp_path / "tiny.gguf")
    with pytest.raises(ModelFileError, match=f"^no such file or folder: {tmp_path}/tiny.gguf; copy the model"):
        path.find()
