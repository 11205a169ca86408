"""The cache folder: downloaded models, compiled kernels, packed weights."""

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from helexa.core.errors import ConfigError


def cache_root(configured: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder.

    The result is the first of these paths that is set: `configured`, `$HELEXA_CACHE`, `$XDG_CACHE_HOME/helexa`,
    `~/.cache/helexa`.

    Raises:
        ConfigError: the path begins with `~` and the home folder is unknown.
    """
    configured_path = configured or environ.get("HELEXA_CACHE")
    if configured_path:
        return expanded(Path(configured_path))
    xdg_cache = environ.get("XDG_CACHE_HOME")
    return (Path(xdg_cache) if xdg_cache else expanded(Path("~/.cache"))) / "helexa"


PROMPTS_FOLDER = "prompts"
"""Subfolder of the cache folder with the KV pages of earlier prompts: one folder for each model and its settings."""

_MOST_PROMPT_BYTES = 20 << 30


def default_prompts_mb() -> int:
    """Return the size limit in MiB of saved prompts for private engines and `up`.

    The limit is `$HELEXA_PROMPTS_MB` if set, else a tenth of the free disk space, but at most 20 GiB.

    Raises:
        ConfigError: the variable is not a number.
    """
    limit = os.environ.get("HELEXA_PROMPTS_MB", "")
    if limit:
        if not limit.isdecimal():
            raise ConfigError(
                f"HELEXA_PROMPTS_MB is '{limit[:20]}'; set it to a number of MiB, or to 0 to save no prompts to disk"
            )
        return int(limit)
    folder = cache_root(None).absolute()
    while not folder.exists():
        folder = folder.parent
    return min(shutil.disk_usage(folder).free // 10, _MOST_PROMPT_BYTES) >> 20


PACKED_FOLDER, PACKED_SUFFIX = "packed", ".tiles"
"""Subfolder of the cache folder with packed weights, and the suffix of its files."""


def model_name(path: Path) -> str:
    """Return a hub snapshot's repository name, else the file name without `.gguf`."""
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name.removesuffix(".gguf")


class SavedFiles(NamedTuple):
    """Files that engines have saved for a model with certain engine settings."""

    kind: Literal["prompts", "weights"]
    models: tuple[str, ...]  # ids of the model; for weights, the name of its file or repository
    size: int  # in bytes
    used: float  # time of the last use, in seconds since 1970
    files: list[Path]


def saved_prompts() -> list[SavedFiles]:
    """Return the saved prompts on this machine, the least recently used first."""
    found: list[SavedFiles] = []
    for folder in (cache_root(None) / PROMPTS_FOLDER).glob("*"):
        with suppress(OSError):  # an engine may delete files at the same time
            files = list(folder.glob("*.segment"))
            if files:
                states = [path.stat() for path in files]
                size, used = sum(state.st_size for state in states), max(state.st_mtime for state in states)
                found.append(SavedFiles("prompts", _models(folder), size, used, files))
    return sorted(found, key=lambda prompts: prompts.used)


def _models(folder: Path) -> tuple[str, ...]:
    """Return the ids of the models that have saved prompts in a folder."""
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = (folder / "model").read_text(encoding="utf-8", errors="replace").splitlines()
    return tuple(names) or ("unknown",)


def packed_weights() -> list[SavedFiles]:
    """Return the packed weights on this machine, the least recently used first."""
    found: list[SavedFiles] = []
    for path in (cache_root(None) / PACKED_FOLDER).glob(f"*{PACKED_SUFFIX}"):
        with suppress(OSError):  # an engine may delete files at the same time
            state = path.stat()
            # The file name is `MODEL.DIGEST.DIGEST.tiles`.
            model = path.stem.rsplit(".", 2)[0].replace("--", "/")
            found.append(SavedFiles("weights", (model,), state.st_size, state.st_mtime, [path]))
    return sorted(found, key=lambda weights: weights.used)


def delete_saved(entries: Iterable[SavedFiles]) -> int:
    """Delete saved files, and return their size in bytes.

    Raises:
        OSError: a file cannot be deleted.
    """
    entries = list(entries)
    for entry in entries:
        for path in entry.files:
            path.unlink(missing_ok=True)
        folder = entry.files[0].parent
        if entry.kind == "prompts" and not any(folder.glob("*.segment")):
            shutil.rmtree(folder, ignore_errors=True)
    return sum(entry.size for entry in entries)


def expanded(path: Path) -> Path:
    """Return `path` with a leading `~` replaced by the user's home folder.

    Raises:
        ConfigError: the home folder is unknown.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path}: '~' stands for no folder, because the home folder is unknown; set HOME, or write an absolute path"
        ) from None


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder that the Hugging Face Hub's own tools use by default.

    Raises:
        ConfigError: the home folder is unknown, and no environment variable names a cache folder.
    """
    path = environ.get("HF_HUB_CACHE")
    return expanded(Path(path)) if path else hub_home(environ) / "hub"


def hub_home(environ: Mapping[str, str]) -> Path:
    """Return the folder of the Hub's own tools.

    The folder is `$HF_HOME`, else `$XDG_CACHE_HOME/huggingface`, else `~/.cache/huggingface`.
    """
    if home := environ.get("HF_HOME"):
        return expanded(Path(home))
    return expanded(Path(environ.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface"
