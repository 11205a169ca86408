"""The cache folder, which contains downloaded models, compiled kernels and packed weights."""

import os
from collections.abc import Mapping
from pathlib import Path

from helexa.core.errors import ConfigError


def cache_root(configured: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder.

    It is the first of these paths that is set: `configured`, `$HELEXA_CACHE`, `$XDG_CACHE_HOME/helexa`,
    `~/.cache/helexa`.

    Raises:
        ConfigError: the path begins with `~` and the home folder is unknown.
    """
    configured_path = configured or environ.get("HELEXA_CACHE")
    if configured_path:
        return expanded(Path(configured_path))
    xdg_cache = environ.get("XDG_CACHE_HOME")
    return (Path(xdg_cache) if xdg_cache else expanded(Path("~/.cache"))) / "helexa"


def expanded(path: Path) -> Path:
    """Return `path` with a leading `~` replaced by the user's home folder.

    Raises:
        ConfigError: the path begins with `~` and the home folder is unknown.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: HOME is not set; set HELEXA_CACHE or [cache] dir to a folder") from None
