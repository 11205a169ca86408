"""`helexa config show`: print the effective configuration."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from cyclopts import App, Parameter
from pydantic import BaseModel, SecretStr

from helexa.cli.flags_and_completion import AsJson, Switch
from helexa.cli.terminal_output_and_errors import USAGE, CommandError, note, printable
from helexa.core.command_line import VERSION_FLAGS
from helexa.core.environment_variables import Keys
from helexa.core.version import version_line
from helexa.neuron.engine_flags import EngineFlags

app = App(
    name="config",
    help="Show the configuration of a node or a gateway.",
    result_action="return_value",
    version=partial(version_line, "helexa"),
    version_flags=VERSION_FLAGS,
)

_MASK = "***"


_Server = Literal["node", "gateway"]
_Row = tuple[str, Any, str]
_FILES: dict[_Server, tuple[Path, Path]] = {
    "node": (Path("neuron.toml"), Path("/etc/neuron/neuron.toml")),
    "gateway": (Path("cortex.toml"), Path("/etc/cortex/cortex.toml")),
}


@app.command
def show(
    server: _Server | None = None,
    /,
    *,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    origin: Switch = False,
    as_json: AsJson = False,
    engine: EngineFlags = EngineFlags(),  # noqa: B008
) -> None:
    """Show the values with which a server would start, with secrets masked.

    The values come from the same defaults, file, environment variables and options as those of the server.

    Args:
        server: The server to show: `node` (neuron.toml) or `gateway` (cortex.toml). Default: each server that has its
            file in this folder, /etc/neuron or /etc/cortex.
        config: Configuration file, else none for a node and cortex.toml for a gateway.
        origin: Show where each value comes from: default, file and line, environment variable, or option.
        as_json: Print JSON for programs: key, value and origin of each setting.
    """
    if server is not None:
        rows = _rows(server, config, engine)
        print(json.dumps(_objects(rows), indent=2) if as_json else _text(rows, origin=origin))
        return
    if config is not None:
        raise CommandError(
            f"{config} may configure a node or a gateway; say which: `helexa config show node -c {config}`, "
            f"or `helexa config show gateway -c {config}`",
            USAGE,
        )
    files: dict[_Server, Path] = {
        name: file for name, paths in _FILES.items() if (file := next(filter(Path.is_file, paths), None))
    }
    if not files:
        paths = ", ".join(str(path) for pair in _FILES.values() for path in pair)
        raise CommandError(
            f"no configuration file found; looked for {paths}; name one with `helexa config show node -c FILE`, "
            "or `helexa config show gateway -c FILE`",
            USAGE,
        )
    all_rows: dict[_Server, list[_Row]] = {name: _rows(name, file, engine) for name, file in files.items()}
    if as_json:
        print(json.dumps({name: _objects(rows) for name, rows in all_rows.items()}, indent=2))
    else:
        print("\n\n".join(f"# {name}: {files[name]}\n{_text(rows, origin=origin)}" for name, rows in all_rows.items()))


def _rows(server: _Server, config: Path | None, engine: EngineFlags) -> list[_Row]:
    """Return key, value and origin of each setting of a server."""
    origins: dict[Keys, str] = {}
    settings: BaseModel
    if server == "node":
        from helexa.neuron.config import read_config

        settings = read_config(config, warn=note, flags=engine.settings(), origins=origins)
    else:
        from helexa.cortex.config import load

        settings = load(config or Path("cortex.toml"), origins)
    return [(".".join(keys), value, _origin(keys, origins)) for keys, value in _values(settings, ())]


def _objects(rows: list[_Row]) -> list[dict[str, Any]]:
    return [dict(zip(("key", "value", "origin"), row, strict=True)) for row in rows]


def _text(rows: list[_Row], *, origin: bool) -> str:
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value, _ in rows]
    width = min(max(map(len, lines)), 70)
    if origin:
        lines = [f"{line:<{width}}  # {source}" for line, (_, _, source) in zip(lines, rows, strict=True)]
    return "\n".join(map(printable, lines))


def _origin(keys: Keys, origins: Mapping[Keys, str]) -> str:
    return next((origins[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in origins), "default")


def _values(value: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield path and JSON value of each setting, with secrets masked."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _values(getattr(value, name), (*path, name))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _values(inner, (*path, str(name)))
    elif isinstance(value, list) and any(isinstance(element, BaseModel) for element in value):
        for index, element in enumerate(value):
            yield from _values(element, (*path, str(index)))
    else:
        yield path, _json_value(value)


def _json_value(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return _MASK
    if isinstance(value, bool | int | float | None):
        return value
    if isinstance(value, list):
        return [_json_value(element) for element in value]
    if isinstance(value, set | frozenset):
        return sorted(str(element) for element in value)
    return _without_password(str(value))


def _without_password(text: str) -> str:
    """Return `text`, with user and password masked if it is a URL."""
    try:
        netloc = urlsplit(text).netloc
    except ValueError:
        return text
    return text.replace(netloc, f"{_MASK}@{netloc.rpartition('@')[2]}", 1) if "@" in netloc else text
