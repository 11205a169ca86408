"""Environment variables of the library, and the URLs of local servers."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

LOCAL_URLS = ("http://127.0.0.1:31313", "http://127.0.0.1:13131")
"""Default URLs of a gateway and a node on this machine."""

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def text(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the value of the library's variable `name`, or else of its alias.

    Return None if both are unset or empty.
    """
    return (environ.get(name) or environ.get(ALIASES.get(name, ""), "")).strip() or None


def number(name: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the value of the library's variable `name`, a positive integer.

    Return None if the variable and its alias are unset or empty.

    Raises:
        ConfigError: the value is not a positive integer.
    """
    value = text(name, environ)
    if value is None:
        return None
    if not value.isdecimal() or not 0 < int(value) < 1 << 31:
        raise _invalid(name, environ, f"'{value}' is not a positive integer; set a positive integer, or unset {name}")
    return int(value)


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the library's variable `name` is 1, true, yes or on.

    Return False if the variable and its alias are unset or empty.

    Raises:
        ConfigError: the value is not a boolean.
    """
    value = (text(name, environ) or "").lower()
    if value not in _YES + _NO:
        raise _invalid(name, environ, f"'{value}' is not a boolean; set 1 or 0")
    return value in _YES


def _invalid(name: str, environ: Mapping[str, str], reason: str) -> "ConfigError":
    # A local import, because commands import this module before they start an engine process, and a slow import would
    # delay this start.
    from helexa.core.errors import ConfigError

    return ConfigError(f"{name if environ.get(name) else ALIASES.get(name, name)}: {reason}")
