"""Configuration: a TOML file overlaid by environment variables, validated strictly.

An environment variable `PREFIX_A__B` sets key `b` of table `a`. Its value is read as TOML when it parses as such, else
as plain text. Unknown keys of the file are refused with the nearest known name; unknown variables are ignored.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from helexa.core.errors import ConfigError
from helexa.core.variables import Keys, overlay


class Section(BaseModel):
    """Base of every configuration table: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


ConfigT = TypeVar("ConfigT", bound=Section)


def load(
    schema: type[ConfigT],
    path: Path | None,
    *,
    env_prefix: str,
    short_names: Mapping[str, Keys] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ConfigT:
    """Read `path` (may be None: defaults only) and overlay variables that start with `env_prefix`.

    Args:
        short_names: further variables, and the keys that they set unless a variable with the full name is set.

    Raises:
        ConfigError: one line naming the file or variable, the key, and what is wrong with it.
    """
    tree: dict[str, Any] = {} if path is None else read_toml(path)
    origins = overlay(tree, schema, env_prefix, short_names or {}, os.environ if environ is None else environ)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, schema, str(path or "environment"), origins)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

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
    first_error = error.errors(include_url=False)[0]
    path = tuple(str(part) for part in first_error["loc"])
    origin = next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), file)
    key = ".".join(path)
    if first_error["type"] != "extra_forbidden":
        return ": ".join(part for part in (origin, key, first_error["msg"].removeprefix("Value error, ")) if part)
    known_keys = _known_keys(schema, path[:-1])
    close_matches = difflib.get_close_matches(path[-1], known_keys, n=1)
    hint = f"did you mean '{close_matches[0]}'?" if close_matches else f"known keys: {', '.join(sorted(known_keys))}"
    return f"{origin}: unknown key '{key}'; {hint}"


def _known_keys(schema: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    for name in path:
        field = schema.model_fields.get(name)
        if field is None:
            continue  # a list index or a free-form table key: the schema stays that of its container
        subsection = _section_of(field.annotation)
        if subsection is None:
            return []
        schema = subsection
    return list(schema.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        section = _section_of(argument)
        if section is not None:
            return section
    return None
