"""Reload of configuration and catalogue by a running gateway."""

import logging
from pathlib import Path
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually, running_cortex
from helexa.core import catalogue as catalogues
from helexa.core.catalogue import Catalogue
from helexa.core.errors import ConfigError
from helexa.cortex import config as configs
from helexa.cortex import reload
from helexa.cortex.config import CortexConfig
from helexa.cortex.reload import Reloader, differences

MODEL = '[[models]]\nid = "Org/A"\n'


class Files:
    """cortex.toml and models.toml in a folder, and the configurations that a reload applied."""

    def __init__(self, folder: Path) -> None:
        self.config, self.models = folder / "cortex.toml", folder / "models.toml"
        self.config.write_text('models_config = "models.toml"\n')
        self.models.write_text(MODEL)
        self.applied: list[tuple[CortexConfig, Catalogue]] = []
        config = configs.load(self.config)
        self.reloader = Reloader(self.config, config, catalogues.load(config.models_config), self._apply)

    def _apply(self, config: CortexConfig, catalogue: Catalogue) -> None:
        if config.gateway.insecure:
            raise ConfigError("contradictory settings")
        self.applied.append((config, catalogue))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_changes_are_applied_and_logged(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.models.write_text(MODEL + 'quant = "q4k"\n[aliases]\nsmall = "Org/A"\n')
    files.config.write_text(files.config.read_text() + '[gateway]\nlisten = "127.0.0.1:9"\n[[neurons]]\nname = "n"\n')
    files.config.write_text(files.config.read_text() + 'endpoint = "http://n:1"\nbearer = "hush"\n')
    caplog.set_level(logging.INFO)
    await files.reloader.reload()
    config, catalogue = files.applied[0]
    assert (config.neurons[0].name, catalogue.resolve("small")) == ("n", "Org/A")
    messages = [record.getMessage() for record in caplog.records if record.name == "helexa.cortex.reload"]
    assert "reloaded: models[Org/A].quant: None became 'q4k'" in messages
    assert "reloaded: aliases.small: 'Org/A' is new" in messages
    assert any(message.startswith("reloaded: gateway.listen") and "next start" in message for message in messages)
    assert any("neurons[n].endpoint" in message for message in messages)
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("models", "[[models]]\n"),
        ("models", "[[models"),
        ("models", MODEL + MODEL),
        ("config", "[gateway]\nlistn = 1\n"),
        ("config", 'models_config = "models.toml"\n[gateway]\ninsecure = true\n'),
    ],
)
async def test_invalid_files_change_nothing(
    files: Files, caplog: pytest.LogCaptureFixture, file: str, text: str
) -> None:
    path: Path = getattr(files, file)
    valid_text = path.read_text()
    path.write_text(text)
    await files.reloader.reload()
    assert files.applied == []
    assert "reload failed, configuration unchanged" in caplog.text
    path.write_text(valid_text)
    await files.reloader.reload()
    assert len(files.applied) == 1


async def test_missing_catalogue_keeps_the_previous_one(files: Files) -> None:
    files.models.unlink()
    await files.reloader.reload()
    assert files.applied == []


NODE = '[[neurons]]\nname = "n1"\nendpoint = "http://n1:1"\n'
KEYS = '[entitlements]\nrequire_auth = true\n[[entitlements.keys]]\nkey = "k"\naccount_id = "a"\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (NODE + KEYS, "entitlements.require_auth is missing, and without it all clients have access"),
        (KEYS + NODE, "all [[neurons]] are missing"),
    ],
)
async def test_cut_off_file_opens_nothing_and_drops_no_node(
    files: Files, caplog: pytest.LogCaptureFixture, text: str, error: str
) -> None:
    text = files.config.read_text() + text
    files.config.write_text(text)
    await files.reloader.reload()
    assert len(files.applied) == 1
    for size in range(len(text)):
        files.config.write_text(text[:size])
        await files.reloader.reload()
    for config, _ in files.applied:
        assert config.entitlements.require_auth and config.neurons
    assert error in caplog.text


async def test_explicit_words_open_a_gateway_and_remove_its_nodes(files: Files) -> None:
    files.config.write_text(files.config.read_text() + NODE + KEYS)
    await files.reloader.reload()
    files.config.write_text('models_config = "models.toml"\nneurons = []\n[entitlements]\nrequire_auth = false\n')
    await files.reloader.reload()
    config, _ = files.applied[-1]
    assert not config.entitlements.require_auth and config.neurons == []


@pytest.mark.parametrize("key", ["key", "bearer"])
def test_secrets_are_not_logged(key: str) -> None:
    def config(secret: str) -> CortexConfig:
        sections: dict[str, Any] = {
            "key": {"entitlements": {"keys": [{"key": secret, "account_id": "a"}]}},
            "bearer": {"neurons": [{"name": "n", "endpoint": "http://n", "bearer": secret}]},
        }
        return CortexConfig.model_validate(sections[key])

    (line,) = differences(config("first"), config("second"))
    assert "first" not in line
    assert "second" not in line


async def test_running_gateway_reloads_its_files(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "INTERVAL_SECS", 0.05)
    (tmp_path / "models.toml").write_text('[[models]]\nid = "Org/M"\n')
    path = tmp_path / "cortex.toml"
    text = f'models_config = "models.toml"\n[ledger]\nurl = "sqlite:{tmp_path}/x.db"\n'
    neuron = f'[[neurons]]\nname = "n1"\nendpoint = "{node.url}"\n'
    path.write_text(text + neuron)
    async with FakeNode("n2").holds("Org/N").serving() as second, running_cortex(node, path=path) as cortex:
        assert (await cortex.ask("small"))[0] == 404
        (tmp_path / "models.toml").write_text('[[models]]\nid = "Org/M"\n[aliases]\nsmall = "Org/M"\n')

        async def is_served(model: str) -> bool:
            return (await cortex.ask(model))[0] == 200

        await eventually(lambda: is_served("small"))
        path.write_text(text + neuron + f'[[neurons]]\nname = "n2"\nendpoint = "{second.url}"\n')
        await eventually(lambda: is_served("Org/N"))
        path.write_text(text + neuron + "[entitlements]\nrequire_auth = true\n")

        async def closed() -> bool:
            return (await cortex.ask("small"))[0] == 401

        await eventually(closed)
