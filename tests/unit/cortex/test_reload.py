"""Reload of configuration and catalog by a running gateway."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually, running_cortex
from helexa.core import catalog as catalogs
from helexa.core.catalog import Catalog
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
        self.applied: list[tuple[CortexConfig, Catalog]] = []
        config = configs.load(self.config)
        self.reloader = Reloader(self.config, config, catalogs.load(config.models_config), self._apply)

    def _apply(self, config: CortexConfig, catalog: Catalog) -> None:
        if config.gateway.insecure:
            raise ConfigError("contradictory settings")
        self.applied.append((config, catalog))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_changed_settings_are_applied_and_logged_at_a_reload(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.models.write_text(MODEL + 'quant = "q4k"\n[aliases]\nsmall = "Org/A"\n')
    files.config.write_text(files.config.read_text() + '[gateway]\nlisten = "127.0.0.1:9"\n[[neurons]]\nname = "n"\n')
    files.config.write_text(files.config.read_text() + 'endpoint = "http://n:1"\nbearer = "hush"\n')
    caplog.set_level(logging.INFO)
    await files.reloader.reload()
    config, catalog = files.applied[0]
    assert (config.neurons[0].name, catalog.resolve("small")) == ("n", "Org/A")
    messages = [record.getMessage() for record in caplog.records if record.name == "helexa.cortex.reload"]
    assert "setting reloaded setting=models[Org/A].quant old=None new=q4k" in messages
    assert "setting reloaded setting=aliases.small old=- new=Org/A" in messages
    assert any(
        "setting=gateway.listen " in message and "; it takes effect at the next start" in message
        for message in messages
    )
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
async def test_reload_of_invalid_files_changes_nothing(
    files: Files, caplog: pytest.LogCaptureFixture, file: str, text: str
) -> None:
    path: Path = getattr(files, file)
    valid_text = path.read_text()
    path.write_text(text)
    await files.reloader.reload()
    assert files.applied == []
    assert "reload failed error=" in caplog.text
    path.write_text(valid_text)
    await files.reloader.reload()
    assert len(files.applied) == 1


async def test_reload_with_a_missing_catalog_file_keeps_the_previous_catalog(files: Files) -> None:
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
async def test_reload_of_a_truncated_file_neither_drops_required_keys_nor_nodes(
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


LIMITS = {
    "models": '["Org/A"]',
    "hard_cap": "1000",
    "requests_per_minute": "10",
    "tokens_per_minute": "100",
    "concurrency": "2",
    "key_id": '"a1"',
}
OIDC = """[console.oidc]
issuer = "https://id.example.com"
client_id = "helexa"
public_url = "https://llm.example.com"
users = ["*"]
account_claim = "sub"
hard_cap = 5000
concurrency = 3
"""


async def test_reload_of_a_truncated_file_lifts_no_limit_of_a_key(files: Files) -> None:
    text = files.config.read_text() + NODE + KEYS + "".join(f"{name} = {value}\n" for name, value in LIMITS.items())
    text += '[[entitlements.keys]]\nkey = "k2"\naccount_id = "b"\nhard_cap = 1000\n'
    for size in (len(text), *range(len(text))):
        files.config.write_text(text[:size])
        await files.reloader.reload()
    assert len(files.applied) > 2
    for key in [key for config, _ in files.applied for key in config.entitlements.keys]:
        assert key.hard_cap is not None and 1 <= key.hard_cap <= 1000
        if key.account_id == "a":
            assert (key.models, key.key_id) == (["Org/A"], "a1")
            assert all(1 <= getattr(key, name) <= int(value) for name, value in LIMITS.items() if value.isdecimal())


async def test_reload_of_a_truncated_file_lifts_no_limit_of_signed_in_users(files: Files) -> None:
    text = files.config.read_text() + NODE + KEYS + OIDC
    for size in (len(text), *range(text.index("issuer"), len(text))):
        files.config.write_text(text[:size])
        await files.reloader.reload()
    assert files.applied[0][0].console.oidc is not None
    for oidc in filter(None, (config.console.oidc for config, _ in files.applied)):
        assert oidc.account_claim == "sub"
        assert 1 <= (oidc.hard_cap or 0) <= 5000 and 1 <= (oidc.concurrency or 0) <= 3


@pytest.mark.parametrize("limit", [name for name in LIMITS if name != "key_id"])
async def test_reload_lifts_a_limit_of_a_key_only_if_the_file_says_unlimited(
    files: Files, caplog: pytest.LogCaptureFixture, limit: str
) -> None:
    start = files.config.read_text() + NODE + KEYS
    for text in (f"{limit} = {LIMITS[limit]}\n", "", f'{limit} = "unlimited"\n', ""):
        files.config.write_text(start + text)
        await files.reloader.reload()
    values = [getattr(config.entitlements.keys[0], limit) for config, _ in files.applied]
    assert values[1:] == [None, None] and values[0] is not None
    assert f'had {limit}, which the changed file lacks; to remove {limit}, write {limit} = "unlimited"' in caplog.text


async def test_reload_rejects_a_new_key_in_a_last_line_without_a_line_break(files: Files) -> None:
    start = files.config.read_text() + NODE + KEYS
    new = '[[entitlements.keys]]\nkey = "k2"\naccount_id = "b"'
    for text in ("", new, new + "\n"):
        files.config.write_text(start + text)
        await files.reloader.reload()
    assert [len(config.entitlements.keys) for config, _ in files.applied] == [1, 2]


async def test_reload_signal_rereads_files_that_have_not_changed(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = asyncio.create_task(files.reloader.run())
    files.reloader.request()
    await eventually(lambda: files.applied)
    run.cancel()
    assert "configuration reloaded; nothing has changed" in caplog.text


async def test_reload_removes_nodes_and_required_keys_if_the_file_explicitly_unsets_them(files: Files) -> None:
    files.config.write_text(files.config.read_text() + NODE + KEYS)
    await files.reloader.reload()
    files.config.write_text('models_config = "models.toml"\nneurons = []\n[entitlements]\nrequire_auth = false\n')
    await files.reloader.reload()
    config, _ = files.applied[-1]
    assert not config.entitlements.require_auth and config.neurons == []


@pytest.mark.parametrize("key", ["key", "bearer"])
def test_reload_logs_no_secrets(key: str) -> None:
    def config(secret: str) -> CortexConfig:
        sections: dict[str, Any] = {
            "key": {"entitlements": {"keys": [{"key": secret, "account_id": "a"}]}},
            "bearer": {"neurons": [{"name": "n", "endpoint": "http://n", "bearer": secret}]},
        }
        return CortexConfig.model_validate(sections[key])

    ((_, old, new),) = differences(config("first"), config("second"))
    assert "first" not in old
    assert "second" not in new


async def test_running_gateway_reloads_its_changed_configuration_and_catalog(
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
