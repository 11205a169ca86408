"""The environment variables of the library, and their aliases."""

import os
from collections.abc import Mapping

from helexa.core.errors import ConfigError

BASE_URL = "HELEXA_BASE_URL"
API_KEY = "HELEXA_API_KEY"
MODEL = "HELEXA_MODEL"
DEVICE = "HELEXA_DEVICE"
NUM_PARALLEL = "HELEXA_NUM_PARALLEL"
FORCE_F32 = "HELEXA_FORCE_F32"

ALIASES = {
    NUM_PARALLEL: "CANDLE_NUM_PARALLEL",
    FORCE_F32: "CANDLE_FORCE_F32",
}
"""Alternative names of variables, read if the variable with the helexa name is not set. `HF_TOKEN` and other variables
of the Hugging Face Hub have no helexa name.
"""

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def text(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the value of the environment variable `name`, or of its alias if `name` is not set.

    Return None if both are unset or empty.
    """
    return (environ.get(name) or environ.get(ALIASES.get(name, ""), "")).strip() or None


def number(name: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the value of the environment variable `name` as a positive integer, or None if it is unset.

    Raises:
        ConfigError: the value is not a positive integer.
    """
    value = text(name, environ)
    if value is None:
        return None
    if not value.isdecimal() or not 0 < int(value) < 1 << 31:
        raise ConfigError(f"{_set_name(name, environ)}: '{value}' is not a positive integer")
    return int(value)


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the value of the environment variable `name` is 1, true, yes or on.

    Raises:
        ConfigError: the value is not a boolean.
    """
    value = (text(name, environ) or "").lower()
    if value not in _YES + _NO:
        raise ConfigError(f"{_set_name(name, environ)}: '{value}' is not a boolean; set 1 or 0")
    return value in _YES


def _set_name(name: str, environ: Mapping[str, str]) -> str:
    return name if environ.get(name) else ALIASES.get(name, name)
