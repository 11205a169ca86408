from itertools import permutations
from pathlib import Path

import pytest
from pydantic import AliasChoices, Field

from helexa.core.config import Section, load, read_secret, read_toml, secret_in_variable
from helexa.core.environment_variables import log_unknown_variables
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


def error_of(tmp_path: Path, text: str = "", **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, text, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_empty_configuration_gives_the_defaults() -> None:
    assert load(Settings, None, env_prefix="APP_", environ={}) == Settings()


def test_nested_tables_and_lists_of_a_configuration_file_are_read(tmp_path: Path) -> None:
    loaded = settings(
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
    assert (loaded.port, loaded.engine.threads, loaded.engine.device) == (81, 4, "cpu")
    assert [(model.name, model.devices) for model in loaded.models] == [("a", [0, 1]), ("b", [])]
    assert loaded.by_name["c"].name == "c"


def test_environment_variables_override_the_configuration_file(tmp_path: Path) -> None:
    loaded = settings(
        tmp_path,
        "port = 81\n[engine]\nthreads = 4\ndevice = 'x'",
        APP_PORT="82",
        APP_ENGINE__DEVICE="cuda:0",
        APP_SPARE__THREADS="2",
        APP_MODELS='[{name = "a", devices = [3]}]',
        OTHER_PORT="1",
    )
    assert (loaded.port, loaded.engine) == (82, Engine(threads=4, device="cuda:0"))
    assert loaded.spare == Engine(threads=2)
    assert loaded.models == [Model(name="a", devices=[3])]


def test_environment_value_that_is_invalid_toml_is_used_as_a_plain_string(tmp_path: Path) -> None:
    assert settings(tmp_path, APP_ENGINE__DEVICE="it's = fine").engine.device == "it's = fine"


@pytest.mark.parametrize(
    ("text", "fragments"),
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
def test_error_for_an_invalid_value_in_the_file_names_the_key_and_the_file(
    tmp_path: Path, text: str, fragments: list[str]
) -> None:
    message = error_of(tmp_path, text)
    assert "app.toml" in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("name", "value", "fragments"),
    [
        ("APP_PORT", "many", ["APP_PORT: port: "]),
        ("APP_ENGINE", "3", ["APP_ENGINE: engine: "]),
        ("APP_MODELS", '[{name = "a", devcies = [1]}]', ["APP_MODELS: unknown key", "did you mean 'devices'?"]),
    ],
)
def test_error_for_an_invalid_environment_value_names_the_key_and_the_variable(
    tmp_path: Path, name: str, value: str, fragments: list[str]
) -> None:
    message = error_of(tmp_path, "port = 81", **{name: value})
    for fragment in fragments:
        assert fragment in message


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
def test_environment_variable_without_a_matching_key_is_ignored(tmp_path: Path, name: str, value: str) -> None:
    assert settings(tmp_path, "port = 81", **{name: value}) == Settings(port=81)


def test_environment_variable_for_a_table_that_the_file_sets_to_a_number_is_rejected(tmp_path: Path) -> None:
    message = "APP_ENGINE__THREADS: 'engine' is a value, not a section; correct the name or the file"
    assert error_of(tmp_path, "engine = 1", APP_ENGINE__THREADS="1") == message


def test_environment_variable_sets_a_key_in_a_table_that_the_user_names(tmp_path: Path) -> None:
    assert settings(tmp_path, APP_BY_NAME__X__NAME="a").by_name == {"x": Model(name="a")}


def test_variable_with_the_current_table_name_overrides_the_former_table_name(tmp_path: Path) -> None:
    file = "[motor]\nthreads = 1\ndevice = 'file'"
    loaded = load_renamed(tmp_path, file, APP_ENGINE__THREADS="2")
    assert loaded == Engine(threads=2, device="file")
    assert load_renamed(tmp_path, file, APP_MOTOR__THREADS="3") == Engine(threads=3, device="file")
    assert load_renamed(tmp_path, file, APP_THREADS="4") == Engine(threads=4, device="file")
    everything = {"APP_THREADS": "4", "APP_MOTOR__THREADS": "3", "APP_ENGINE__THREADS": "2"}
    for names in permutations(everything):
        assert load_renamed(tmp_path, file, **{name: everything[name] for name in names}).threads == 2
    assert load_renamed(tmp_path, file, APP_THREADS="4", APP_MOTOR__THREADS="3").threads == 3


def test_file_with_both_the_former_and_current_name_of_a_table_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="motor"):
        load_renamed(tmp_path, "[motor]\nthreads = 1\n[engine]\nthreads = 1")


class Renamed(Section):
    engine: Engine = Field(default_factory=Engine, validation_alias=AliasChoices("engine", "motor"))


def load_renamed(tmp_path: Path, text: str, **environ: str) -> Engine:
    path = tmp_path / "app.toml"
    path.write_text(text)
    return load(
        Renamed, path, env_prefix="APP_", short_names={"APP_THREADS": ("engine", "threads")}, environ=environ
    ).engine


@pytest.mark.parametrize(
    ("environ", "level", "message"),
    [
        (
            {"APP_RT_VISIBLE_CORES": "0", "APP_PORT": "tcp://10.0.0.1:80"},
            "INFO",
            "names=APP_PORT,APP_RT_VISIBLE_CORES more=0",
        ),
        (
            {"APP_ENGINE__TREADS": "1", "APP_ENGINE_THREADS": "1", "APP_SERVICE_HOST": "x"},
            "WARNING",
            "names=APP_ENGINE_THREADS,APP_ENGINE__TREADS more=1; "
            "did you mean APP_ENGINE__THREADS, APP_ENGINE__THREADS?",
        ),
        ({f"APP_X{number}": "1" for number in range(10)}, "INFO", "APP_X6,APP_X7 more=2"),
    ],
)
def test_unknown_environment_variables_are_logged_in_one_line(
    caplog: pytest.LogCaptureFixture, environ: dict[str, str], level: str, message: str
) -> None:
    caplog.set_level("INFO")
    log_unknown_variables(Settings, prefix="APP_", environ=environ)
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage().endswith(message)


def test_nothing_is_logged_if_there_are_no_unknown_environment_variables(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    environ = {"APP_PORT": "1", "APP_SHORT": "1", "APP_ELSEWHERE": "1", "OTHER_PROT": "1"}
    log_unknown_variables(
        Settings, prefix="APP_", short={"APP_SHORT": ("port",)}, other_names=["APP_ELSEWHERE"], environ=environ
    )
    assert not caplog.records


def test_unreadable_configuration_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_toml(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        read_toml(binary)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b" key-1\n", None),
        (b"", "printable ASCII"),
        (b"two words", "printable ASCII"),
        (b"two\nlines", "printable ASCII"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file or directory"),
    ],
)
def test_key_file_must_contain_one_valid_key(tmp_path: Path, content: bytes | None, expected: str | None) -> None:
    path = tmp_path / "node.key"
    if content is not None:
        path.write_bytes(content)
    if expected is None:
        assert read_secret(path, "api_key_file").get_secret_value() == "key-1"
        return
    with pytest.raises(ConfigError, match=expected) as caught:
        read_secret(path, "api_key_file")
    assert str(caught.value).startswith(f"{path}: api_key_file ")
    assert "words" not in str(caught.value)


def test_error_for_an_unreadable_key_file_names_the_file_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\); name a file"):
        read_secret(tmp_path, "api_key_file")


def test_variable_that_names_a_key_must_be_set_and_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAST_KEY", "key-1")
    assert secret_in_variable("BEAST_KEY", "bearer_env").get_secret_value() == "key-1"
    monkeypatch.setenv("BEAST_KEY", "two words")
    with pytest.raises(ConfigError, match="BEAST_KEY contains no valid key") as caught:
        secret_in_variable("BEAST_KEY", "bearer_env")
    assert "two words" not in str(caught.value)
    monkeypatch.delenv("BEAST_KEY")
    with pytest.raises(ConfigError, match="BEAST_KEY is not set"):
        secret_in_variable("BEAST_KEY", "bearer_env")
