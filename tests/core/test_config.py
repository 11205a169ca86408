from pathlib import Path

import pytest
from pydantic import Field

from helexa.core.config import Section, load, read_toml
from helexa.core.errors import ConfigError


class Engine(Section):
    threads: int = 0
    device: str = "cpu"


class Model(Section):
    name: str
    devices: list[int] = Field(default_factory=list[int])


class Settings(Section):
    port: int = Field(80, ge=1, le=65535)
    engine: Engine = Field(default_factory=Engine)
    spare: Engine | None = None
    models: list[Model] = Field(default_factory=list[Model])
    by_name: dict[str, Model] = Field(default_factory=dict[str, Model])


def settings(tmp_path: Path, text: str = "", **environ: str) -> Settings:
    path = tmp_path / "app.toml"
    path.write_text(text)
    return load(Settings, path, env_prefix="APP_", environ=environ)


def complaint(tmp_path: Path, text: str = "", **environ: str) -> str:
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, text, **environ)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_nothing_said_is_the_defaults() -> None:
    assert load(Settings, None, env_prefix="APP_", environ={}) == Settings()


def test_a_file_with_nested_tables_and_lists(tmp_path: Path) -> None:
    read = settings(
        tmp_path,
        """
        port = 81
        [engine]
        threads = 4
        [[models]]
        name = "a"
        devices = [0, 1]
        [[models]]
        name = "b"
        [by_name.c]
        name = "c"
        """,
    )
    assert (read.port, read.engine.threads, read.engine.device) == (81, 4, "cpu")
    assert [(model.name, model.devices) for model in read.models] == [("a", [0, 1]), ("b", [])]
    assert read.by_name["c"].name == "c"


def test_the_environment_comes_last(tmp_path: Path) -> None:
    read = settings(
        tmp_path,
        "port = 81\n[engine]\nthreads = 4\ndevice = 'x'",
        APP_PORT="82",
        APP_ENGINE__DEVICE="cuda:0",
        APP_SPARE__THREADS="2",
        APP_MODELS='[{name = "a", devices = [3]}]',
        OTHER_PORT="1",
    )
    assert (read.port, read.engine) == (82, Engine(threads=4, device="cuda:0"))
    assert read.spare == Engine(threads=2)
    assert read.models == [Model(name="a", devices=[3])]


def test_a_value_that_is_not_toml_is_text(tmp_path: Path) -> None:
    assert settings(tmp_path, APP_ENGINE__DEVICE="it's = fine").engine.device == "it's = fine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["unknown key 'prot'", "did you mean 'port'?"]),
        ("zzz = 1", ["unknown key 'zzz'", "known keys: by_name, engine, models, port, spare"]),
        ("[engine]\ntreads = 1", ["unknown key 'engine.treads'", "did you mean 'threads'?"]),
        ("[spare]\ntreads = 1", ["unknown key 'spare.treads'", "did you mean 'threads'?"]),
        ("[[models]]\nname = 'a'\nnmae = 'b'", ["unknown key 'models.0.nmae'", "did you mean 'name'?"]),
        ("[by_name.x]\nname = 'a'\ndevice = 1", ["unknown key 'by_name.x.device'", "did you mean 'devices'?"]),
        ("port = 'x'", ["port: "]),
        ("port = 0", ["port: ", "greater than or equal to 1"]),
        ("[[models]]\n", ["models.0.name: "]),
        ("port =", ["app.toml: "]),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, words: list[str]) -> None:
    said = complaint(tmp_path, text)
    assert "app.toml" in said
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("APP_PORT", "many", ["APP_PORT: port: "]),
        ("APP_PROT", "1", ["APP_PROT: unknown key 'prot'", "did you mean 'port'?"]),
        ("APP_ENGINE__", "1", ["APP_ENGINE__: empty key"]),
        ("APP_PORT__DEEP", "1", ["APP_PORT__DEEP: 'port' is not a table"]),
    ],
)
def test_what_is_wrong_is_named_with_its_variable(tmp_path: Path, name: str, value: str, words: list[str]) -> None:
    said = complaint(tmp_path, "port = 81", **{name: value})
    for word in words:
        assert word in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_toml(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        read_toml(binary)
