"""Environment variables that override settings.

The variable `PREFIX_A__B` sets key `b` of table `a`.
Variables that match no key of the configuration have no effect, because other programs use the same prefixes. For
example, AWS Neuron has `NEURON_RT_VISIBLE_CORES`. For a service named `cortex`, Kubernetes sets `CORTEX_SERVICE_HOST`
and `CORTEX_PORT=tcp://10.0.0.1:31313`.
"""

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import AliasChoices, BaseModel

from helexa.core.errors import ConfigError
from helexa.core.logs import quoted

log = logging.getLogger(__name__)

Keys = tuple[str, ...]

_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
_MIN_SIMILARITY = 0.9
_MAX_NAMES = 8


def overlay(
    tree: dict[str, Any], schema: type[BaseModel], prefix: str, short: Mapping[str, Keys], environ: Mapping[str, str]
) -> dict[Keys, str]:
    """Override values in the parsed file `tree` by environment variables.

    Configuration tables may have former names, which are accepted in the file and in variables. In `tree`, the current
    names replace the former names. If several variables set the same key, the precedence is: the variable with the
    current full name, a variable with a former name, a variable in `short`.

    Args:
        tree: the parsed configuration file, which is changed in place.
        schema: class of the whole configuration.
        prefix: prefix of the environment variables to read.
        short: path of a configuration key for each additional variable name.

    Returns:
        The names of the variables that override the file, by the path of the overridden key.

    Raises:
        ConfigError: a variable sets a key in a table, but the file has a plain value in place of this table.
    """
    _rename_tables(tree, schema)
    origins: dict[Keys, str] = {}
    for name, keys in sorted(
        _matching_variables(schema, prefix, short, environ), key=lambda item: _precedence(*item, prefix)
    ):
        set_value(tree, keys, parse_value(environ[name]), name)
        origins[keys] = name
    return origins


def set_value(tree: dict[str, Any], keys: Keys, value: Any, name: str) -> None:
    """Set `value` at the key path `keys` in `tree`, the parsed configuration file.

    `name` is the variable or option that has the value, for error messages.

    Raises:
        ConfigError: `tree` has a plain value in place of a table.
    """
    table_of(tree, keys, name)[keys[-1]] = value


def table_of(tree: dict[str, Any], keys: Keys, name: str) -> dict[str, Any]:
    """Return the table that contains the key with the path `keys`, created if missing.

    `name` is the variable or option that sets the key, for error messages.

    Raises:
        ConfigError: `tree` has a plain value in place of a table.
    """
    table = tree
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: '{key}' is a value, not a section; correct the name or the file")
    return table


def parse_value(text: str) -> Any:
    """Parse the value of a variable as TOML; return text that is not TOML unchanged."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def variable_name(prefix: str, keys: Keys) -> str:
    """Return the full name of the variable that sets the key `keys`."""
    return prefix + "__".join(keys).upper()


def log_unknown_variables(
    schema: type[BaseModel],
    *,
    prefix: str,
    short: Mapping[str, Keys] | None = None,
    other_names: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Log the variables that begin with `prefix` but match no configuration key.

    If some of the variables look like misspelled keys, only these are listed in a warning. Otherwise, all are listed at
    the level info. A line lists at most eight names, and counts the other variables.

    Args:
        short: path of a configuration key for each additional variable name.
        other_names: names of variables that other code reads. They are not logged.
    """
    short = short or {}
    known_names = {name for name, _ in _matching_variables(schema, prefix, short, environ)} | set(other_names)
    unknown = [name for name in sorted(environ) if name.startswith(prefix) and name not in known_names]
    names = [variable_name(prefix, keys) for keys in _paths(schema)] + [*short]
    similar = {
        name: difflib.get_close_matches(name, names, n=1, cutoff=_MIN_SIMILARITY)
        for name in unknown
        if name not in names
    }
    misspelled = {name: match[0] for name, match in similar.items() if match}
    listed = [*(misspelled or unknown)][:_MAX_NAMES]
    fields = (quoted(",".join(listed)), len(unknown) - len(listed))
    if misspelled:
        meant = ", ".join(misspelled[name] for name in listed)
        log.warning(
            "ignored environment variables that are not settings names=%s more=%d; did you mean %s?", *fields, meant
        )
    elif unknown:
        log.info("ignored environment variables that are not settings names=%s more=%d", *fields)


def _matching_variables(
    schema: type[BaseModel], prefix: str, short: Mapping[str, Keys], environ: Mapping[str, str]
) -> Iterator[tuple[str, Keys]]:
    """Yield the name and the key path of each variable that sets a key of `schema`."""
    for name, value in environ.items():
        if not name.startswith(prefix):
            continue
        if name == f"{prefix}PORT" and _SERVICE_LINK.match(value):
            continue  # Kubernetes sets this variable for a service, so it is ignored even if `port` is a key
        keys = short.get(name) or _resolve(schema, tuple(name.removeprefix(prefix).lower().split("__")))
        if keys is not None:
            yield name, keys


def _precedence(name: str, keys: Keys, prefix: str) -> tuple[bool, bool, str]:
    """Return a sort key for a variable. Variables that sort later take precedence."""
    return name.lower() == (prefix + "__".join(keys)).lower(), "__" in name, name


def _resolve(annotation: Any, keys: Keys) -> Keys | None:
    """Return `keys` with current names, or None if `annotation` has no such key."""
    if not keys:
        return ()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            if keys[0] in (name, *_former_names(field.validation_alias)):
                path = _resolve(field.annotation, keys[1:])
                return None if path is None else (name, *path)
        return None
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        path = _resolve(arguments[1], keys[1:]) if keys[0] else None
        return None if path is None else (keys[0], *path)
    return next((path for argument in arguments if (path := _resolve(argument, keys)) is not None), None)


def _paths(schema: type[BaseModel]) -> Iterator[Keys]:
    """Yield the paths of all keys of a schema, without the keys in free-form tables."""
    for name, field in schema.model_fields.items():
        section = next(_sections(field.annotation), None)
        if section is None:
            yield (name,)
        else:
            yield from ((name, *keys) for keys in _paths(section))


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) not in (dict, list):
        for argument in get_args(annotation):
            yield from _sections(argument)


def _rename_tables(tree: dict[str, Any], schema: type[BaseModel]) -> None:
    for name, field in schema.model_fields.items():
        for former_name in _former_names(field.validation_alias):
            if former_name in tree and name not in tree:
                tree[name] = tree.pop(former_name)
        section = next(_sections(field.annotation), None)
        if section is not None and isinstance(tree.get(name), dict):
            _rename_tables(tree[name], section)


def _former_names(alias: Any) -> list[str]:
    return [choice for choice in alias.choices if isinstance(choice, str)] if isinstance(alias, AliasChoices) else []
