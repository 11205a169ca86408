"""Hot reload: reads the configuration and the catalogue again when their files change.

If a file is invalid, an error is logged and nothing changes. Valid changes are logged and take effect together. A file
that an editor or a copy has written only in part can be valid, too. So a changed file is read after it has stayed the
same for a second, and a reload opens nothing that was closed unless the file says so in words; see `check_exposure`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from helexa.core import catalogue as catalogues
from helexa.core.catalogue import Catalogue
from helexa.core.errors import ConfigError, HelexaError
from helexa.cortex import config as configs
from helexa.cortex.config import CortexConfig

log = logging.getLogger(__name__)

INTERVAL_SECS = 1.0

_NAMES = ("id", "name", "key_id", "account_id")
_ONLY_AT_START = (
    "gateway.listen",
    "gateway.metrics_listen",
    "gateway.cors_origins",
    "gateway.insecure",
    "gateway.max_connections",
    "ledger",
)
_MAX_LOGGED = 20

_Stamp = tuple[int, int, int] | None
Apply = Callable[[CortexConfig, Catalogue], None]


class Reloader:
    """Watches the configuration files of a gateway, and applies changes.

    Args:
        path: path of cortex.toml. None if the configuration comes only from environment variables.
        config, catalogue: the configuration and catalogue at the start.
        apply: function that applies a new configuration and catalogue, or raises `HelexaError` and changes nothing.
    """

    def __init__(self, path: Path | None, config: CortexConfig, catalogue: Catalogue, apply: Apply) -> None:
        self._path = path
        self._config = config
        self._catalogue = catalogue
        self._apply = apply
        self._last_stamps = self._seen_stamps = self._stamps()

    async def run(self) -> None:
        """Check every second whether a file has changed, and reload changed files. Runs until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECS)
            file_stamps = await asyncio.to_thread(self._stamps)
            is_written = file_stamps == self._seen_stamps  # unchanged since the last look
            self._seen_stamps = file_stamps
            if is_written and file_stamps != self._last_stamps:
                self._last_stamps = file_stamps
                await self.reload()

    async def reload(self) -> None:
        """Read the configuration and the catalogue again and apply their changes. Log an error if a file is invalid."""
        try:
            config, catalogue = await asyncio.to_thread(self._read)
            check_exposure(self._config, config)
            self._apply(config, catalogue)
        except HelexaError as error:
            log.error("reload failed, configuration unchanged: %s", error)
            return
        changed = [*differences(self._config, config), *differences(self._catalogue, catalogue)]
        self._config, self._catalogue = config, catalogue
        self._last_stamps = self._stamps()
        for line in changed[:_MAX_LOGGED]:
            start_only_note = " (takes effect at the next start)" if line.startswith(_ONLY_AT_START) else ""
            log.info("reloaded: %s%s", line, start_only_note)
        if len(changed) > _MAX_LOGGED:
            log.info("reloaded: %d more changes", len(changed) - _MAX_LOGGED)

    def _read(self) -> tuple[CortexConfig, Catalogue]:
        config = configs.load(self._path)
        if self._catalogue.models and not config.models_config.exists():  # an editor may be replacing the file
            raise ConfigError(f"{config.models_config} does not exist")
        return config, catalogues.load(config.models_config)

    def _stamps(self) -> list[_Stamp]:
        key_files = [neuron.bearer_file for neuron in self._config.neurons]
        return [_stamp(path) for path in (self._path, self._config.models_config, *key_files)]


def check_exposure(previous: CortexConfig, current: CortexConfig) -> None:
    """Reject a configuration that lacks the lines without which the gateway would be open or without nodes.

    A configuration file that was cut off lacks them. A line such as `require_auth = false` is an explicit decision.

    Raises:
        ConfigError: the new configuration does not mention `require_auth` although keys were required, or mentions no
            nodes although there were nodes.
    """
    entitlements = current.entitlements
    if (
        previous.entitlements.require_auth
        and not entitlements.require_auth
        and "require_auth" not in entitlements.model_fields_set
    ):
        raise ConfigError(
            "entitlements.require_auth is missing, and without it all clients have access; to allow this, write "
            "require_auth = false"
        )
    if previous.neurons and not current.neurons and "neurons" not in current.model_fields_set:
        raise ConfigError("all [[neurons]] are missing; to remove all nodes, write neurons = []")


def differences(previous: BaseModel, current: BaseModel) -> list[str]:
    """Return one line of text per value that differs between two configurations. Secrets are not shown."""
    old, new = dict(_leaves("", previous)), dict(_leaves("", current))
    lines = [f"{key}: {old[key]!r} became {new[key]!r}" for key in old if key in new and old[key] != new[key]]
    lines += [f"{key}: {value!r} is new" for key, value in new.items() if key not in old]
    return lines + [f"{key} is gone" for key in old if key not in new]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting in a configuration.

    In the dotted name, a list entry is identified by its id or name if it has one, else by its position.
    """
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), member)
    elif isinstance(value, list) and value and all(isinstance(entry, BaseModel) for entry in value):
        for position, entry in enumerate(value):
            name = next((str(getattr(entry, name)) for name in _NAMES if getattr(entry, name, None)), str(position))
            yield from _leaves(f"{path}[{name}]", entry)
    else:
        yield path, value


def _stamp(path: Path | None) -> _Stamp:
    if path is None:
        return None
    try:
        file_stat = path.stat()
    except OSError:
        return None
    return file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino
