"""Reads and validates a configuration: a TOML file and environment variables.

An environment variable `PREFIX_A__B` overrides key `b` of table `a`. Its value is parsed as TOML if possible, else used
as plain text. An unknown key in the file is an error, and the message names the most similar known key. Unknown
environment variables are ignored.

Today's servers accept the configuration files of the first helexa, which was written in Rust. In a single warning, a
server then logs the settings that have another name now and those that have no effect (`FormerSetting`).
"""

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr, ValidationError

from helexa.core.environment_variables import Keys, overlay, parse_value, set_value, table_of, variable_name
from helexa.core.errors import ConfigError, UsageError
from helexa.core.version import __version__

log = logging.getLogger(__name__)

_TABLE = re.compile(r"\s*(?P<array>\[\[?)\s*(?P<name>[^\[\]=]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*(?P<name>[\w."'-]+(\s*\.\s*[\w."'-]+)*)\s*=""")


@dataclass(frozen=True)
class FormerSetting:
    """A key of the first helexa's configuration files that today's schema lacks."""

    keys: Keys  # path of the key or table in the file
    replacement: Keys | None = None  # path of the key that takes the value. None if the setting has no effect.
    # Function that converts the former value to the value of `replacement`. If the function returns None, the
    # default applies.
    convert: Callable[[Any], Any] = lambda value: value
    reason: str = ""  # why the setting has no effect, for the warning. Empty if `replacement` is set.

    def __str__(self) -> str:
        name = ".".join(self.keys)
        if self.replacement is not None:
            return f"{name} sets {'.'.join(self.replacement)}"
        return f"{name} has no effect" + (f" ({self.reason})" if self.reason else "")


class Section(BaseModel):
    """Base class of all configuration tables. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


ConfigT = TypeVar("ConfigT", bound=Section)


def _check_header_secret(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("an API key must be one or more printable ASCII characters without blanks; correct the key")
    return secret


# Type of an API key that is sent in an HTTP header. Error messages and logs do not show its value.
HeaderSecret = Annotated[SecretStr, AfterValidator(_check_header_secret)]


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
    origins: dict[Keys, str] | None = None,
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
        origins: a dictionary to fill with the origin of each value that is not a default, by the path of the key:
            `FILE:LINE`, `FILE` if the line is unknown, or the name of the variable or option. The origin of a table or
            list applies to all values in it.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid. The message names the file, variable or option,
            the key, and the problem.
        UsageError: the value of a command line option is invalid.
    """
    tree: dict[str, Any] = {} if path is None else read_toml(path)
    environ = os.environ if environ is None else environ
    notes = [*_replace_former_settings(tree, former, env_prefix, environ)]
    notes += [
        f"{name} has no effect" + (f" ({hint})" if hint else "")
        for name, hint in (retired or {}).items()
        if name in environ
    ]
    if notes:
        warn(f"{path or 'environment'}: settings of the first helexa: {'; '.join(notes)}; see docs/migration.md")
    overridden = overlay(tree, schema, env_prefix, short_names or {}, environ)
    for keys, (name, value) in (flags or {}).items():
        set_value(tree, keys, value, name)
        overridden[keys] = name
    if origins is not None:
        in_file = _file_origins(tree, path)
        origins |= {keys: origin for keys, origin in in_file.items() if not _is_inside(keys, overridden)} | overridden
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        message = _explain(error, schema, str(path or "environment"), overridden)
        options = tuple(f"{name}: " for name, _ in (flags or {}).values())
        raise UsageError(message) if message.startswith(options) else ConfigError(message) from None


def read_secret(path: Path, name: str) -> SecretStr:
    """Return the API key in the file `path`, without surrounding blanks and line ends.

    `name` is the setting that contains the path, for error messages.

    Raises:
        ConfigError: the file cannot be read, or it contains no valid key. The message names the file and the fix.
    """
    try:
        secret = SecretStr(path.read_text(encoding="utf-8").strip())
    except OSError as error:
        hint = {FileNotFoundError: "create the file", IsADirectoryError: "name a file"}.get(
            type(error), "let the server's user read the file"
        )
        raise ConfigError(f"{path}: {name} cannot be read ({error.strerror}); {hint}, or change {name}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: {name} contains no valid key; the file is not UTF-8 text") from None
    try:
        return _check_header_secret(secret)
    except ValueError as error:
        raise ConfigError(f"{path}: {name} contains no valid key; {error}") from None


def secret_in_variable(variable: str, name: str) -> SecretStr:
    """Return the API key in the environment variable `variable`.

    `name` is the setting that contains the variable's name, for error messages.

    Raises:
        ConfigError: the variable is not set, or it contains no valid key.
    """
    if variable not in os.environ:
        raise ConfigError(f"{name}: the environment variable {variable} is not set; set it, or change {name}")
    try:
        return _check_header_secret(SecretStr(os.environ[variable]))
    except ValueError as error:
        raise ConfigError(f"{name}: the environment variable {variable} contains no valid key; {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file and return its tables as a dictionary.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 or not TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; create the file, or name another file with --config") from None
    except IsADirectoryError:
        names = ", ".join(sorted(str(file) for file in path.glob("*.toml"))[:3])
        raise ConfigError(f"{path} is a folder; name a file" + (f" in it: {names}" if names else "")) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; let the server's user read the file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the file is not valid TOML: {error}; correct the file") from None


def _file_origins(tree: dict[str, Any], path: Path | None) -> dict[Keys, str]:
    lines = {} if path is None else _key_lines(path.read_text(encoding="utf-8"))
    return {keys: f"{path}:{lines[keys]}" if keys in lines else str(path or "environment") for keys in _leaves(tree)}


def _is_inside(keys: Keys, tables: Mapping[Keys, str]) -> bool:
    return any(keys[:end] in tables for end in range(1, len(keys)))


def _key_lines(text: str) -> dict[Keys, int]:
    """Return the line number of each key of a TOML file, except in inline tables."""
    table: Keys = ()
    lengths: dict[Keys, int] = {}
    lines: dict[Keys, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = _with_indices(_split_key(match["name"]), lengths, starts_element=match["array"] == "[[")
        elif match := _KEY.match(line):
            lines.setdefault((*table, *_split_key(match["name"])), number)
    return lines


def _with_indices(keys: Keys, lengths: dict[Keys, int], *, starts_element: bool) -> Keys:
    """Return `keys` with an index after each key of a list of tables.

    The index is that of the list's last element so far. `lengths` has the number of elements of each list so far. If
    `starts_element` is True, a new element of the list `keys` is counted first.
    """
    path: Keys = ()
    for place, key in enumerate(keys, 1):
        path = (*path, key)
        if starts_element and place == len(keys):
            lengths[path] = lengths.get(path, 0) + 1
        if path in lengths:
            path = (*path, str(lengths[path] - 1))
    return path


def _split_key(text: str) -> Keys:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _leaves(value: Any, path: Keys = ()) -> Iterator[Keys]:
    """Yield the paths of values that are neither tables nor lists of tables."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(element, dict) for element in value):
        for index, element in enumerate(value):
            yield from _leaves(element, (*path, str(index)))
    else:
        yield path


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
            continue  # `part` is a list index or a key of a free-form table, to which the same schema applies
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


def _replace_former_settings(
    tree: dict[str, Any], settings: Sequence[FormerSetting], prefix: str, environ: Mapping[str, str]
) -> Iterator[str]:
    """Replace former settings in the parsed file `tree`, and yield what changed.

    A current key in the file takes precedence over the former key that it replaces. An environment variable with the
    full name of the former key takes precedence over the file.

    Raises:
        ConfigError: `tree` has a plain value in place of a table that must contain a current key.
    """
    for setting in settings:
        is_in_file, value = _take(tree, setting.keys)
        name = variable_name(prefix, setting.keys)
        if name in environ:
            value = parse_value(environ[name])
        elif not is_in_file:
            continue
        yield str(setting)
        if setting.replacement is None or (value := setting.convert(value)) is None:
            continue
        table = table_of(tree, setting.replacement, name if name in environ else ".".join(setting.keys))
        if name in environ or setting.replacement[-1] not in table:
            table[setting.replacement[-1]] = value


def _take(tree: dict[str, Any], keys: Keys) -> tuple[bool, Any]:
    """Remove the key `keys` from `tree`; return whether it existed, and its value."""
    inner = tree.get(keys[0])
    if len(keys) == 1:
        return keys[0] in tree, tree.pop(keys[0], None)
    if not isinstance(inner, dict):
        return False, None
    taken = _take(inner, keys[1:])
    if taken[0] and not inner and len(keys) == 2:
        del tree[keys[0]]
    return taken
