"""Models that helexa knows: their short names, sizes and sources.

The file `known_models.toml` lists them. `python -m helexa.core.known_models` prints them as the table of
docs/models-to-run.md.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("known_models.toml")
_HUB_PREFIXES = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
_WORKING_SHARE = 1.2
_WORKING_GB = 0.5


@dataclass(frozen=True)
class KnownModel:
    """A well-known model."""

    name: str  # name as the commands take it, with the quantization
    size_gb: float  # size of the download in GB (10^9 bytes)
    license: str  # license as the model's repository states it
    good_for: str  # what the model is good for
    short_names: tuple[str, ...] = ()  # names of the model in Ollama's library
    active_gb: float | None = None  # GB of weights that each token reads, if they are fewer than `size_gb`
    offered: bool = False  # whether `helexa run` may offer the model

    @property
    def label(self) -> str:
        """The shortest name that commands take: a short name, except for built-in models."""
        return self.name if ":" not in self.name else self.short_names[0]

    @property
    def memory_gb(self) -> float:
        """Estimated free memory that a conversation of a few thousand tokens needs.

        The unit is 2^30 bytes, as for other amounts of memory (see `memory_text`). Sizes of files are in 10^9 bytes.
        """
        return round((self.size_gb * _WORKING_SHARE + _WORKING_GB) * 1e9 / 2**30, 1)

    @property
    def read_gb(self) -> float:
        """GB of weights that each token reads, which limit the speed on CPUs."""
        return self.size_gb if self.active_gb is None else self.active_gb


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all models of `known_models.toml`, the smallest first."""
    tables = tomllib.loads(_FILE.read_text(encoding="utf-8"))["models"]
    return tuple(KnownModel(**table | {"short_names": tuple(table["short_names"])}) for table in tables)


def full_name(name: str) -> str:
    """Return the full name of the model that `name` means.

    The short name of a known model, such as `llama3.2:1b`, becomes the model's full name. The address of the Hugging
    Face Hub in front of a name, as in `hf.co/org/name`, is removed. Other names stay as they are.
    """
    repository = name
    while prefix := next((prefix for prefix in _HUB_PREFIXES if repository.strip().lower().startswith(prefix)), ""):
        repository = repository.strip()[len(prefix) :].rstrip("/")
    return _full_names().get(repository.strip().lower().removesuffix(":latest"), repository)


def short_names() -> list[str]:
    """Return the short names of all known models."""
    return list(_full_names())


@cache
def _full_names() -> dict[str, str]:
    return {short_name: model.name for model in known_models() for short_name in model.short_names}


def markdown_table() -> str:
    """Return the known models as a table in Markdown, for the documentation."""
    rows: list[tuple[str, ...]] = []
    for model in known_models():
        sizes = (f"{model.size_gb:.1f} GB", f"{model.memory_gb:.1f} GB")
        rows.append((f"`{model.label}`", *sizes, model.good_for, model.license, f"`{model.name}`"))
    headings = ("Name", "Size", "Memory", "Good for", "License", "Model")
    lines = [headings, ("---", "---:", "---:", "---", "---", "---"), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(markdown_table(), end="")
