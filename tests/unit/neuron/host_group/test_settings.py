"""The settings of a host group."""

from pathlib import Path
from typing import Any

import pytest

from helexa.core.errors import ConfigError
from helexa.neuron.config import GroupConfig
from helexa.neuron.engine.ipc.host_channel import HostAddress
from helexa.neuron.host_group import group_settings

VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29600"}


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret of 20 bytes\n")
    return path


def test_variables_of_torch_distributed_provide_missing_host_group_settings(secret_file: Path) -> None:
    settings = group_settings(GroupConfig(interface="127.0.0.2", secret_file=secret_file), VARIABLES)
    assert (settings.host, settings.hosts) == (1, 2)
    assert settings.master == HostAddress("10.0.0.1", 29600)
    assert settings.own == HostAddress("127.0.0.2", 29600)
    assert settings.secret == b"a secret of 20 bytes"


def test_host_group_settings_in_the_file_take_precedence_over_variables(secret_file: Path) -> None:
    config = GroupConfig(rank=0, world_size=3, master_addr="a", master_port=1, interface="lo", secret_file=secret_file)
    settings = group_settings(config, VARIABLES)
    assert (settings.host, settings.hosts, settings.master) == (0, 3, HostAddress("a", 1))
    assert settings.own == HostAddress("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("changes", "missing", "message"),
    [
        ({}, "RANK", r"the host group has no rank; set \[group\] rank or RANK: the number of this host, from 0"),
        ({}, "WORLD_SIZE", "has no world_size"),
        ({}, "MASTER_ADDR", "has no master_addr"),
        ({"interface": None}, None, r"has no interface; set \[group\] interface or NEURON_GROUP__INTERFACE"),
        ({"secret_file": None}, None, "has no secret_file"),
        ({"rank": 2}, None, r"rank is 2, expected 0 to 1 \(world_size is 2\)"),
        ({"world_size": 1}, None, "world_size is 1; a group has at least 2 hosts"),
        ({"master_port": 70000}, None, "master_port is 70000"),
        ({"interface": "eth99"}, None, "'eth99' is neither an IP address nor a network interface"),
        ({"interface": "0.0.0.0"}, None, "0.0.0.0, which is not a private address"),
        ({"interface": "8.8.8.8"}, None, "8.8.8.8, which is not a private address"),
        ({"secret_file": Path("/nowhere")}, None, "secret_file /nowhere cannot be read: No such file"),
    ],
)
def test_error_for_invalid_host_group_settings_is_one_line(
    secret_file: Path, changes: dict[str, Any], missing: str | None, message: str
) -> None:
    config = GroupConfig(**{"interface": "lo", "secret_file": secret_file} | changes)
    with pytest.raises(ConfigError, match=message) as caught:
        group_settings(config, {name: value for name, value in VARIABLES.items() if name != missing})
    assert "\n" not in str(caught.value)


def test_too_short_host_group_secret_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigError, match="has 5 bytes, expected 16 or more"):
        group_settings(GroupConfig(interface="lo", secret_file=tmp_path / "secret"), VARIABLES)


def test_host_group_variable_that_is_no_number_is_rejected(secret_file: Path) -> None:
    with pytest.raises(ConfigError, match="RANK is 'one', expected a number"):
        group_settings(GroupConfig(interface="lo", secret_file=secret_file), VARIABLES | {"RANK": "one"})
