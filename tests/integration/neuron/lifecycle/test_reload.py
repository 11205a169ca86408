"""Reload of a node's configuration."""

import logging
from pathlib import Path

import pytest

from helexa.neuron.app import Reloader
from helexa.neuron.config import NeuronConfig, read_config

KEY = 'api_key = "a-key"\n'


class Node:
    """The configuration file of a node, and the configurations that a reload applied."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file = folder / "neuron.toml"
        self.file.write_text(text)
        self.applied: list[NeuronConfig] = []
        self._reloader = Reloader(self._read(), self._read, self.applied.append)

    def reload(self, text: str) -> None:
        self.file.write_text(text)
        self._reloader.reload()

    def _read(self) -> NeuronConfig:
        return read_config(self.file, {})


@pytest.fixture(autouse=True)
def no_logging_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helexa.neuron.app.logs.configure", lambda *_: None)  # replaces pytest's handler


def test_reload_applies_changed_settings_or_logs_that_they_need_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = Node(tmp_path, KEY)
    node.reload('api_key = "a-new-key"\nhost = "0.0.0.0"\ndrain_secs = 9\n')
    [config] = node.applied
    assert config.api_key is not None and config.api_key.get_secret_value() == "a-new-key"
    assert (config.drain_secs, config.host) == (9, "127.0.0.1")
    lines = [record.getMessage() for record in caplog.records if record.name == "helexa.neuron.app"]
    assert sorted(lines) == ["setting reloaded setting=api_key", "setting reloaded setting=drain_secs"]
    node.reload('api_key = "a-new-key"\ndrain_secs = 9\n[downloads]\nmax_concurrent = 7\n')
    assert caplog.messages[-1] == "changed setting not applied setting=downloads; it takes effect at the next start"


@pytest.mark.parametrize("text", ["", "drain_secs = 5\n", "drain_secs = x\n", "drain = 1\n" + KEY])
def test_reload_of_a_file_that_is_invalid_or_lacks_the_api_key_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    node = Node(tmp_path, KEY)
    node.reload(text)
    assert node.applied == []
    assert "reload failed error=" in caplog.text
