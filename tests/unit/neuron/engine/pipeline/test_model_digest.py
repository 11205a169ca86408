"""The digest with which hosts compare the files of a model."""

from pathlib import Path

import pytest

from helexa.neuron.engine.model_path_and_digest import model_digest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_model_digest_depends_on_the_file_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, contents in ((one, b"a" * 100), (two, b"a" * 99 + b"b")):
        folder.mkdir()
        (folder / "model.gguf").write_bytes(contents)
    assert model_digest(one / "model.gguf") != model_digest(two / "model.gguf")


def test_model_digest_does_not_depend_on_the_folder_name(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.gguf").write_bytes(b"weights")
    assert model_digest(tmp_path / "one/model.gguf") == model_digest(tmp_path / "two/model.gguf")


def test_model_digest_of_a_folder_covers_weights_and_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    first = model_digest(folder)
    (folder / "README.md").write_text("a readme")
    assert model_digest(folder) == first
    (folder / "config.json").write_text('{"a": 1}')
    assert model_digest(folder) != first


def test_model_digest_is_stored_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    first = model_digest(model)
    [stored] = (cache / "digests").iterdir()
    stored.write_text("stored")
    assert model_digest(model) == "stored"
    model.write_bytes(b"other weights")
    assert model_digest(model) not in ("stored", first)
