"""Models that helexa knows: their short names, sizes and sources.

The file `known_models.toml` lists them. `python -m helexa.core.known_models` prints them as the table of
docs/models-to-run.md.
"""

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("known_models.toml")
_HUB_PREFIXES = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
_WORKING_SHARE = 1.2
_WORKING_GB = 0.5
_NEAR = 0.6
_ABOUT_EQUAL = 0.05
_MOST_NEAR = 3


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
        """Estimated free memory for a conversation of a few thousand tokens.

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
    """Return the name of the model that `name` certainly means, else `name`.

    A short name such as `llama3.2:1b` means a known model. A repository may have the address of the Hugging Face Hub in
    front, as in `hf.co/org/name`.
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


def suggestion(name: str, names: Iterable[str]) -> str | None:
    """Return "did you mean ...?" with at most three similar `names`, or None.

    Two names are compared with and without their organizations, quantizations and punctuation.
    """
    ratios = {other: _similarity(name, other) for other in names if other != name}
    near = sorted((other for other in ratios if ratios[other] >= _NEAR), key=lambda other: -ratios[other])
    best = ratios[near[0]] if near else 0.0
    near = [f"'{other}'" for other in near if ratios[other] >= best - _ABOUT_EQUAL][:_MOST_NEAR]
    *first, last = near or [""]
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if last else None


def _similarity(first: str, second: str) -> float:
    pairs = ((first.lower(), second.lower()), (_key(first), _key(second)))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _key(name: str) -> str:
    """Return `name` without organization, quantization and punctuation."""
    name = name.lower().rpartition("/")[2]
    if "-gguf" in name:
        name = name.partition("-gguf")[0]
    for word in ("-instruct", "-it", "meta-"):
        name = name.replace(word, "")
    return "".join(filter(str.isalnum, name))


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
