"""Settings of the first helexa (in Rust) that have another name now, or no effect.

The configuration files of the first helexa start today's servers. A server logs one warning that lists the former
settings in its file and environment.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helexa.core.variables import Keys, parse_value, variable_name


@dataclass(frozen=True)
class FormerSetting:
    """A key of a configuration file that today's schema does not have.

    Attributes:
        keys: path of the key or table in the file.
        replacement: path of the key that takes the value. None if the setting has no effect.
        convert: converts the former value to the value of `replacement`. None as the result leaves the default.
        reason: why the setting has no effect, for the warning. Empty if `replacement` is set.
    """

    keys: Keys
    replacement: Keys | None = None
    convert: Callable[[Any], Any] = lambda value: value
    reason: str = ""

    def __str__(self) -> str:
        name = ".".join(self.keys)
        if self.replacement is not None:
            return f"{name} sets {'.'.join(self.replacement)}"
        return f"{name} has no effect" + (f" ({self.reason})" if self.reason else "")


def replace_former_settings(
    tree: dict[str, Any], settings: Sequence[FormerSetting], prefix: str, environ: Mapping[str, str]
) -> Iterator[str]:
    """Replace former settings in `tree`, the parsed configuration file, and yield a description of each one.

    A current key in the file takes precedence over the former key that it replaces. An environment variable with the
    full name of the former key takes precedence over the file.

    Args:
        tree: the parsed configuration file, which is changed in place.
        settings: the former settings.
        prefix: prefix of the environment variables.
        environ: the environment variables.
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
        table = tree
        for key in setting.replacement[:-1]:
            table = table.setdefault(key, {})
        if name in environ or setting.replacement[-1] not in table:
            table[setting.replacement[-1]] = value


def _take(tree: dict[str, Any], keys: Keys) -> tuple[bool, Any]:
    """Remove the key with the path `keys` from `tree`, and its table if the table is empty afterwards.

    Returns:
        Whether the key existed, and its value.
    """
    inner = tree.get(keys[0])
    if len(keys) == 1:
        return keys[0] in tree, tree.pop(keys[0], None)
    if not isinstance(inner, dict):
        return False, None
    taken = _take(inner, keys[1:])
    if taken[0] and not inner and len(keys) == 2:
        del tree[keys[0]]
    return taken
