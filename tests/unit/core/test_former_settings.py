"""Settings of the first helexa, in files and environment variables."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from helexa.core.config import FormerSetting, Section, load
from helexa.core.errors import ConfigError


class Engine(Section):
    snapshots: int = 0
    reuse: str = "on"


class Settings(Section):
    engine: Engine = Field(default_factory=Engine)
    nodes: list[str] = Field(default_factory=list[str])


FORMER = (
    FormerSetting(("engine", "cache", "budget"), ("engine", "snapshots")),
    FormerSetting(("engine", "cache", "enabled"), ("engine", "reuse"), lambda on: None if on else "off"),
    FormerSetting(("pictures",), reason="none are drawn"),
    FormerSetting(("hosts",), ("nodes",)),
)


def read(tmp_path: Path, text: str, **environ: str) -> tuple[Settings, list[str]]:
    path = tmp_path / "app.toml"
    path.write_text(text)
    warnings: list[str] = []
    retired: dict[str, Any] = {"former": FORMER, "retired": {"APP_OLD": "use a new one", "APP_OLDER": ""}}
    return load(Settings, path, env_prefix="APP_", environ=environ, warn=warnings.append, **retired), warnings


def test_file_with_only_current_keys_gives_no_warning(tmp_path: Path) -> None:
    assert read(tmp_path, "[engine]\nsnapshots = 1") == (Settings(engine=Engine(snapshots=1)), [])


def test_former_keys_set_their_replacements_and_give_one_warning(tmp_path: Path) -> None:
    text = 'hosts = ["a"]\n[engine.cache]\nbudget = 2\nenabled = false\n[pictures]\nsize = 3'
    loaded, warnings = read(tmp_path, text, APP_OLD="1", APP_OLDER="1")
    assert loaded == Settings(engine=Engine(snapshots=2, reuse="off"), nodes=["a"])
    assert warnings == [
        f"{tmp_path / 'app.toml'}: settings of the first helexa: engine.cache.budget sets engine.snapshots; "
        "engine.cache.enabled sets engine.reuse; pictures has no effect (none are drawn); hosts sets nodes; "
        "APP_OLD has no effect (use a new one); APP_OLDER has no effect; see docs/migration.md"
    ]


def test_former_key_whose_value_has_no_equivalent_leaves_the_default(tmp_path: Path) -> None:
    assert read(tmp_path, "[engine.cache]\nenabled = true")[0] == Settings()


def test_current_key_overrides_the_former_key_in_the_same_file(tmp_path: Path) -> None:
    assert read(tmp_path, "[engine]\nsnapshots = 1\n[engine.cache]\nbudget = 2")[0].engine.snapshots == 1


def test_environment_variable_overrides_a_former_key_in_the_file(tmp_path: Path) -> None:
    text = "[engine]\nsnapshots = 1\n[engine.cache]\nbudget = 2"
    assert read(tmp_path, text, APP_ENGINE__CACHE__BUDGET="3")[0].engine.snapshots == 3
    both = {"APP_ENGINE__CACHE__BUDGET": "3", "APP_ENGINE__SNAPSHOTS": "4"}
    assert read(tmp_path, text, **both)[0].engine.snapshots == 4


@pytest.mark.parametrize("text", ["[engine.cache]\nbudge = 1", "[engine.cache]\nbudget = 1\nmore = 1", "engine = 1"])
def test_unknown_keys_beside_former_keys_are_still_errors(tmp_path: Path, text: str) -> None:
    with pytest.raises(Exception, match="engine"):
        read(tmp_path, text)


def test_variable_for_a_former_key_is_rejected_if_its_table_is_a_plain_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="APP_ENGINE__CACHE__BUDGET: 'engine' is a value, not a section"):
        read(tmp_path, "engine = 1", APP_ENGINE__CACHE__BUDGET="3")
