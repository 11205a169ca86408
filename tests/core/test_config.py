from itertools import permutations
from pathlib import Path

import pytest
from pydantic import AliasChoices, Field

from helexa.core.config import Section, load, read_toml
from helexa.core.errors import ConfigError
from helexa.core.variables import log_unknown_variables


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
        ("APP_ENGINE", "3", ["APP_ENGINE: engine: "]),
        ("APP_MODELS", '[{name = "a", devcies = [1]}]', ["APP_MODELS: unknown key", "did you mean 'devices'?"]),
    ],
)
def test_what_is_wrong_is_named_with_its_variable(tmp_path: Path, name: str, value: str, words: list[str]) -> None:
    said = complaint(tmp_path, "port = 81", **{name: value})
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("APP_SERVICE_HOST", "10.0.0.1"),
        ("APP_PORT", "tcp://10.0.0.1:80"),
        ("APP_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("APP_RT_VISIBLE_CORES", "0-3"),
        ("APP_PROT", "1"),
        ("APP_ENGINE__", "1"),
        ("APP_ENGINE__TREADS", "1"),
        ("APP_PORT__DEEP", "1"),
        ("APP_MODELS__0__NAME", "x"),
        ("APP_BY_NAME__A__NMAE", "x"),
        ("APP_", "1"),
    ],
)
def test_variable_that_names_no_key_is_ignored(tmp_path: Path, name: str, value: str) -> None:
    assert settings(tmp_path, "port = 81", **{name: value}) == Settings(port=81)


def test_variable_below_a_value_of_the_file_is_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path, "engine = 1", APP_ENGINE__THREADS="1") == "APP_ENGINE__THREADS: 'engine' is not a table"


def test_variable_sets_a_key_of_a_table_with_a_free_name(tmp_path: Path) -> None:
    assert settings(tmp_path, APP_BY_NAME__X__NAME="a").by_name == {"x": Model(name="a")}


def test_former_name_of_a_table_and_its_variables_agree(tmp_path: Path) -> None:
    file = "[motor]\nthreads = 1\ndevice = 'file'"
    read = renamed(tmp_path, file, APP_ENGINE__THREADS="2")
    assert read == Engine(threads=2, device="file")
    assert renamed(tmp_path, file, APP_MOTOR__THREADS="3") == Engine(threads=3, device="file")
    assert renamed(tmp_path, file, APP_THREADS="4") == Engine(threads=4, device="file")
    everything = {"APP_THREADS": "4", "APP_MOTOR__THREADS": "3", "APP_ENGINE__THREADS": "2"}
    for names in permutations(everything):
        assert renamed(tmp_path, file, **{name: everything[name] for name in names}).threads == 2
    assert renamed(tmp_path, file, APP_THREADS="4", APP_MOTOR__THREADS="3").threads == 3


def test_former_and_current_name_of_a_table_in_one_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="motor"):
        renamed(tmp_path, "[motor]\nthreads = 1\n[engine]\nthreads = 1")


class Renamed(Section):
    engine: Engine = Field(default_factory=Engine, validation_alias=AliasChoices("engine", "motor"))


def renamed(tmp_path: Path, text: str, **environ: str) -> Engine:
    path = tmp_path / "app.toml"
    path.write_text(text)
    return load(
        Renamed, path, env_prefix="APP_", short_names={"APP_THREADS": ("engine", "threads")}, environ=environ
    ).engine


@pytest.mark.parametrize(
    ("environ", "level", "message"),
    [
        ({"APP_RT_VISIBLE_CORES": "0", "APP_PORT": "tcp://10.0.0.1:80"}, "INFO", "APP_PORT, APP_RT_VISIBLE_CORES"),
        (
            {"APP_ENGINE__TREADS": "1", "APP_ENGINE_THREADS": "1", "APP_SERVICE_HOST": "x"},
            "WARNING",
            "APP_ENGINE_THREADS (did you mean APP_ENGINE__THREADS?), "
            "APP_ENGINE__TREADS (did you mean APP_ENGINE__THREADS?) and 1 more",
        ),
        ({f"APP_X{number}": "1" for number in range(10)}, "INFO", "APP_X6, APP_X7 and 2 more"),
    ],
)
def test_unknown_variables_are_logged_in_one_line(
    caplog: pytest.LogCaptureFixture, environ: dict[str, str], level: str, message: str
) -> None:
    caplog.set_level("INFO")
    log_unknown_variables(Settings, prefix="APP_", environ=environ)
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage().endswith(message)


def test_no_line_is_logged_without_unknown_variables(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    environ = {"APP_PORT": "1", "APP_SHORT": "1", "APP_ELSEWHERE": "1", "OTHER_PROT": "1"}
    log_unknown_variables(
        Settings, prefix="APP_", short={"APP_SHORT": ("port",)}, others=["APP_ELSEWHERE"], environ=environ
    )
    assert not caplog.records


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_toml(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        read_toml(binary)
