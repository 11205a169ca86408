"""The environment variables of this library, with the names that they have elsewhere."""

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
"""Names that are understood where ours is not set. `HF_TOKEN` and the Hub's other names keep their own."""

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def text(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """What the variable or its alias says, None where neither says anything."""
    return (environ.get(name) or environ.get(ALIASES.get(name, ""), "")).strip() or None


def number(name: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """A whole number above 0.

    Raises:
        ConfigError: it is something else.
    """
    value = text(name, environ)
    if value is None:
        return None
    if not value.isdecimal() or not 0 < int(value) < 1 << 31:
        raise ConfigError(f"{_spelt(name, environ)}: '{value}' is not a number above 0")
    return int(value)


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether it is switched on.

    Raises:
        ConfigError: it says neither yes nor no.
    """
    value = (text(name, environ) or "").lower()
    if value not in _YES + _NO:
        raise ConfigError(f"{_spelt(name, environ)}: '{value}' is neither 1 nor 0")
    return value in _YES


def _spelt(name: str, environ: Mapping[str, str]) -> str:
    return name if environ.get(name) else ALIASES.get(name, name)
