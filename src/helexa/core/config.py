"""Reads a configuration from a TOML file and environment variables, with strict validation.

An environment variable `PREFIX_A__B` overrides key `b` of table `a`. Its value is parsed as TOML if possible, else used
as plain text. An unknown key in the file is an error, and the message names the most similar known key. Unknown
environment variables are ignored.
"""

import difflib
import logging
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from helexa.core.errors import ConfigError
from helexa.core.former_settings import FormerSetting, replace_former_settings
from helexa.core.variables import Keys, overlay, set_value
from helexa.core.version import __version__

log = logging.getLogger(__name__)


class Section(BaseModel):
    """Base class of all configuration tables. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


ConfigT = TypeVar("ConfigT", bound=Section)


def load(
    schema: type[ConfigT],
    path: Path | None,
    *,
    env_prefix: str,
    short_names: Mapping[str, Keys] | None = None,
    former: Sequence[FormerSetting] = (),
    retired: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[Keys, tuple[str, Any]] | None = None,
    warn: Callable[[str], None] = log.warning,
) -> ConfigT:
    """Read the TOML file `path`, override its values, and return the validated result.

    Environment variables override the file, and command line options override both.

    Args:
        schema: class of the whole configuration.
        path: path of the TOML file. None if there is no file.
        env_prefix: prefix of the environment variables to read.
        short_names: path of a configuration key for each additional variable name. A variable with the key's full
            name (`PREFIX_A__B`) takes precedence.
        former: settings of the first helexa that the file may contain.
        retired: for each variable of the first helexa that has no effect, what replaces it; empty if nothing does.
        environ: the environment variables. None means `os.environ`.
        flags: name and value of a command line option for each path of a configuration key.
        warn: function that gets one line about former settings and retired variables, if there are any.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid. The message names the file, variable or option,
            the key, and the problem.
    """
    tree: dict[str, Any] = {} if path is None else read_toml(path)
    environ = os.environ if environ is None else environ
    notes = [*replace_former_settings(tree, former, env_prefix, environ)]
    notes += [
        f"{name} has no effect" + (f" ({hint})" if hint else "")
        for name, hint in (retired or {}).items()
        if name in environ
    ]
    if notes:
        warn(f"{path or 'environment'}: settings of the first helexa: {'; '.join(notes)}; see docs/migration.md")
    origins = overlay(tree, schema, env_prefix, short_names or {}, environ)
    for keys, (name, value) in (flags or {}).items():
        set_value(tree, keys, value, name)
        origins[keys] = name
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, schema, str(path or "environment"), origins)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file and return its tables as a dictionary.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 or not TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _explain(error: ValidationError, schema: type[BaseModel], file: str, origins: dict[tuple[str, ...], str]) -> str:
    first = error.errors(include_url=False)[0]
    path = tuple(str(part) for part in first["loc"])
    origin = next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), file)
    key = ".".join(path)
    if first["type"] != "extra_forbidden":
        return ": ".join(part for part in (origin, key, first["msg"].removeprefix("Value error, ")) if part)
    known = _known_keys(schema, path[:-1])
    matches = difflib.get_close_matches(path[-1], known, n=1)
    hint = f"did you mean '{matches[0]}'?" if matches else f"known keys: {', '.join(sorted(known))}"
    return f"{origin}: unknown key '{key}'; {hint} (if a newer helexa than {__version__} wrote this, upgrade helexa)"


def _known_keys(schema: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    for part in path:
        field = schema.model_fields.get(part)
        if field is None:
            continue  # a list index or a free-form table key: the container's schema applies
        nested = _section_of(field.annotation)
        if nested is None:
            return []
        schema = nested
    return list(schema.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        section = _section_of(argument)
        if section is not None:
            return section
    return None
