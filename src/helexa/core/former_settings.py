"""Settings of the first helexa, which its configuration files may still contain.

The configuration files of the first helexa (in Rust) start today's servers. A server logs one warning that lists the
settings in its file and environment that have another name now, or no effect.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helexa.core.environment_variables import Keys, parse_value, table_of, variable_name


@dataclass(frozen=True)
class FormerSetting:
    """A key of a configuration file that today's schema does not have."""

    keys: Keys  # path of the key or table in the file
    replacement: Keys | None = None  # path of the key that takes the value. None if the setting has no effect.
    # Converts the former value to the value of `replacement`. None as the result leaves the default.
    convert: Callable[[Any], Any] = lambda value: value
    reason: str = ""  # why the setting has no effect, for the warning. Empty if `replacement` is set.

    def __str__(self) -> str:
        name = ".".join(self.keys)
        if self.replacement is not None:
            return f"{name} sets {'.'.join(self.replacement)}"
        return f"{name} has no effect" + (f" ({self.reason})" if self.reason else "")


def replace_former_settings(
    tree: dict[str, Any], settings: Sequence[FormerSetting], prefix: str, environ: Mapping[str, str]
) -> Iterator[str]:
    """Replace former settings in the parsed file `tree`, and yield what changed.

    A current key in the file takes precedence over the former key that it replaces. An environment variable with the
    full name of the former key takes precedence over the file.

    Raises:
        ConfigError: `tree` has a plain value in place of the table of a current key.
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
