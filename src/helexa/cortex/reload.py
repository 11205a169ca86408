"""Reloads the configuration when its files change, and at SIGHUP.

If a file is invalid, an error is logged and nothing changes. Valid changes are logged and take effect together.

A file can also be valid while an editor or a copy has written only a part of it. Therefore a changed file is read only
after it has stayed the same for a second. For the same reason, a reload lifts a restriction only if the file states
this explicitly; see `check_exposure`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from helexa.core import catalog as catalogs
from helexa.core.catalog import Catalog
from helexa.core.errors import ConfigError, HelexaError
from helexa.core.logs import quoted
from helexa.cortex import config as configs
from helexa.cortex.config import CortexConfig, KeySection, TermsSection

log = logging.getLogger(__name__)

INTERVAL_SECS = 1.0

_NAMES = ("id", "name", "key_id", "account_id")
_ONLY_AT_START = (
    "gateway.listen",
    "gateway.metrics_listen",
    "gateway.cors_origins",
    "gateway.insecure",
    "gateway.max_connections",
    "gateway.ca_file",
    "ollama.listen",
    "ledger",
)
# Settings whose removal must be explicit, because a missing line can mean that the file was cut off. The values are the
# advice in the error message.
_REMOVALS = {
    name: f'write {name} = "unlimited"'
    for name in ("models", "hard_cap", "requests_per_minute", "tokens_per_minute", "concurrency")
} | {"key_id": "restart the gateway", "account_claim": 'write account_claim = "email"'}
_MAX_LOGGED = 20

_Stamp = tuple[int, int, int] | None
Apply = Callable[[CortexConfig, Catalog], None]


class Reloader:
    """Watches the configuration files of a gateway, and applies changes.

    Args:
        path: path of cortex.toml. None if the configuration comes only from environment variables.
        config, catalog: the configuration and catalog at the start.
        apply: function that applies a new configuration and catalog, or raises `HelexaError` and changes nothing.
    """

    def __init__(self, path: Path | None, config: CortexConfig, catalog: Catalog, apply: Apply) -> None:
        self._path = path
        self._config = config
        self._catalog = catalog
        self._apply = apply
        self._last_stamps = self._seen_stamps = self._stamps()
        self._requested = asyncio.Event()
        # All keys since the start. Removed keys stay: if an incomplete file removes a key, and the next incomplete file
        # has the key without its limits, `check_exposure` must still know the limits.
        self._keys = _by_name(config)

    def request(self) -> None:
        """Reload the files soon, even if they have not changed."""
        self._requested.set()

    async def run(self) -> None:
        """Check every second whether a file has changed, and reload changed files."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_SECS):
                    await self._requested.wait()
            if self._requested.is_set():
                self._requested.clear()
                log.info("reload requested by a signal")
                await self.reload()
                continue
            file_stamps = await asyncio.to_thread(self._stamps)
            # If the files have not changed since the last check, they were probably written completely.
            is_written = file_stamps == self._seen_stamps
            self._seen_stamps = file_stamps
            if is_written and file_stamps != self._last_stamps:
                self._last_stamps = file_stamps
                await self.reload()

    async def reload(self) -> None:
        """Apply changes of configuration and catalog; log an error if a file is invalid."""
        try:
            config, catalog, is_complete = await asyncio.to_thread(self._read)
            check_exposure(self._config, config, self._keys, is_complete=is_complete)
            self._apply(config, catalog)
            catalogs.log_unknown_targets(catalog, config.models_config)
        except HelexaError as error:
            log.error("reload failed error=%s; the gateway keeps its present configuration", quoted(error))
            return
        changed = [*differences(self._config, config), *differences(self._catalog, catalog)]
        self._config, self._catalog = config, catalog
        self._keys |= _by_name(config)
        self._last_stamps = self._stamps()
        for setting, *values in changed[:_MAX_LOGGED]:
            fields = map(quoted, (setting, *values))
            if setting.startswith(_ONLY_AT_START):
                log.info("setting reloaded setting=%s old=%s new=%s; it takes effect at the next start", *fields)
            else:
                log.info("setting reloaded setting=%s old=%s new=%s", *fields)
        if len(changed) > _MAX_LOGGED:
            log.info("more settings reloaded settings=%d", len(changed) - _MAX_LOGGED)
        if not changed:
            log.info("configuration reloaded; nothing has changed")

    def _read(self) -> tuple[CortexConfig, Catalog, bool]:
        """Return configuration, catalog, and whether cortex.toml is complete."""
        is_complete = self._path is None or _ends_with_line_break(self._path)
        config = configs.load(self._path)
        # A file that is missing since the start is valid. If it existed before, an editor may be replacing it.
        if self._catalog.models and not config.models_config.exists():
            raise ConfigError(f"{config.models_config} does not exist; create this file, or change models_config")
        return config, catalogs.load(config.models_config), is_complete

    def _stamps(self) -> list[_Stamp]:
        key_files = [neuron.bearer_file for neuron in self._config.neurons]
        return [_stamp(path) for path in (self._path, self._config.models_config, *key_files)]


def check_exposure(
    previous: CortexConfig,
    current: CortexConfig,
    known_keys: Mapping[str, KeySection] | None = None,
    *,
    is_complete: bool = True,
) -> None:
    """Reject a reload that lifts restrictions or removes all nodes only by omission.

    The file may have been cut off. In contrast, a line such as `require_auth = false` is an explicit decision.

    Args:
        known_keys: all keys since the start, as `_by_name` returns them. None means the keys of `previous`.
        is_complete: whether the file ends with a complete line.

    Raises:
        ConfigError: the new configuration does not mention `require_auth` although keys were required, mentions no
            nodes although there were nodes, does not mention a limit, name or claim that a key or `console.oidc` had,
            or has a new key without limits at the end of an incomplete file.
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
    known = _by_name(previous) if known_keys is None else known_keys
    for key in entitlements.keys:
        name = key.key_id or key.account_id
        former = known.get(_secret(key)) or known.get(name)
        if former is not None:
            _check_terms(f"the key of '{name}'", former, key)
        elif not is_complete and key is entitlements.keys[-1]:
            raise ConfigError(
                f"the new key of '{name}' may be incomplete: cortex.toml does not end with a line break; add one"
            )
    if previous.console.oidc is not None and current.console.oidc is not None:
        _check_terms("console.oidc", previous.console.oidc, current.console.oidc)


def _by_name(config: CortexConfig) -> dict[str, KeySection]:
    """Return the keys of a configuration by name, and by the text `_secret(key)`."""
    keys = config.entitlements.keys
    return {key.key_id or key.account_id: key for key in keys} | {_secret(key): key for key in keys}


def _secret(key: KeySection) -> str:
    # In the dictionary of `_by_name`, the prefix keeps secrets apart from key names.
    return f"secret {key.key.get_secret_value()}"


def _check_terms(name: str, former: TermsSection, current: TermsSection) -> None:
    """Reject `current` if it omits a limit, name or claim of `former`."""
    for field, removal in _REMOVALS.items():
        was_set = getattr(former, field, None) is not None and field in former.model_fields_set
        if was_set and field not in current.model_fields_set:
            raise ConfigError(f"{name} had {field}, which the changed file lacks; to remove {field}, {removal}")


def differences(previous: BaseModel, current: BaseModel) -> list[tuple[str, str, str]]:
    """Return name, old and new value of each setting that a reload changes.

    The values contain no secrets. The value of a setting that does not exist is `-`.
    """
    old, new = dict(_leaves("", previous)), dict(_leaves("", current))
    changed = [name for name in old | new if name not in old or name not in new or old[name] != new[name]]
    return [(name, str(old.get(name, "-")), str(new.get(name, "-"))) for name in changed]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting in a configuration.

    In the dotted name, an entry of a list is identified by its id or name, or by its position if it has neither.
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


def _ends_with_line_break(path: Path) -> bool:
    try:
        return path.read_bytes()[-1:] in (b"\n", b"")
    except OSError:
        return False


def _stamp(path: Path | None) -> _Stamp:
    if path is None:
        return None
    try:
        file_stat = path.stat()
    except OSError:
        return None
    return file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino
