"""Sources that speak the protocol of the Hugging Face Hub: list first, choose, then download only that."""

import difflib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from helexa.core.errors import SourceError
from helexa.neuron.sources.cache import expanded
from helexa.neuron.sources.fetch import Fetch
from helexa.neuron.weights.gguf import part_names
from helexa.neuron.weights.quant_form import AUTO, NAMES, is_quant

log = logging.getLogger(__name__)

_REVISION = "main"
_LISTING_SECONDS = 10.0
_SHARD_INDEX = "model.safetensors.index.json"
_BESIDE_SAFETENSORS = (".safetensors", ".json", ".jinja", ".txt", ".model")


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The cache that every tool of the Hub shares.

    Raises:
        ConfigError: there is no home folder, and no variable names one.
    """
    if named := environ.get("HF_HUB_CACHE"):
        return expanded(Path(named))
    if home := environ.get("HF_HOME"):
        return expanded(Path(home)) / "hub"
    return expanded(Path(environ.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface" / "hub"


@dataclass(frozen=True)
class Hub:
    """One hub.

    Attributes:
        scheme: the source scheme it serves.
        endpoint: its base URL, None for the Hugging Face Hub itself.
        auth_env: the environment variable that may hold its token.
        cache_dir: where its files are kept, in the layout of the Hub's own tools.
    """

    scheme: str
    endpoint: str | None
    auth_env: str | None
    cache_dir: Path

    def model(self, name: str, quant: str | None, fetch: Fetch) -> Path:
        """The model of repository `name`: the path of its GGUF file or of its checkpoint folder.

        What was fetched before serves when the hub cannot be reached.

        Raises:
            SourceError: `repo_fetch_failed`, `empty_repo` or `quant_not_found`.
        """
        fetch.progress("list", 0, 0)
        try:
            sizes = self._listing(name)
        except Exception as error:
            cached = self._cached(name, quant)
            if cached is None:
                raise self._in_words(name, error) from error
            log.warning("%s; %s:%s is served from the cache", self._in_words(name, error), self.scheme, name)
            return cached
        files = chosen_files(f"{self.scheme}:{name}", list(sizes), quant)
        try:
            return self._download(name, {file: sizes[file] for file in files}, fetch)
        except SourceError:
            raise
        except Exception as error:
            raise self._in_words(name, error) from error

    def _listing(self, name: str) -> dict[str, int]:
        """File names with their sizes in bytes."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self._token())
        info = api.model_info(name, files_metadata=True, timeout=_LISTING_SECONDS)
        # A name becomes a path below the cache folder, and must stay there.
        return {file.rfilename: file.size or 0 for file in info.siblings or () if ".." not in file.rfilename.split("/")}

    def _download(self, name: str, sizes: dict[str, int], fetch: Fetch) -> Path:
        from huggingface_hub import hf_hub_download

        total = sum(sizes.values())
        done = 0
        paths: list[Path] = []
        for file, size in sizes.items():
            meter = _meter(fetch, done, total)
            path = hf_hub_download(
                name,
                file,
                revision=_REVISION,
                cache_dir=self.cache_dir,
                endpoint=self.endpoint,
                token=self._token(),
                tqdm_class=meter,
            )
            paths.append(Path(path))
            done += size
            fetch.progress("download", done, total)
        if len({path.parent for path in paths}) > 1:
            raise SourceError(f"{self.scheme}:{name} was changed while it was fetched; try again", model_id=name)
        return _model_path(paths)

    def _cached(self, name: str, quant: str | None) -> Path | None:
        """What an earlier fetch left, if it is complete."""
        repository = self.cache_dir / f"models--{name.replace('/', '--')}"
        try:
            snapshot = repository / "snapshots" / (repository / "refs" / _REVISION).read_text().strip()
            present = sorted(path.name for path in snapshot.iterdir() if path.is_file())
            files = chosen_files(f"{self.scheme}:{name}", present, quant)
            shards = set[str]()
            if _SHARD_INDEX in files:
                shards = set(json.loads((snapshot / _SHARD_INDEX).read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, SourceError):
            return None
        complete = shards <= set(files) <= set(present)
        return _model_path([snapshot / file for file in files]) if complete else None

    def _token(self) -> str | bool | None:
        found = os.environ.get(self.auth_env) if self.auth_env else None
        # The login that the Hub's tools have stored is for the Hub alone: no other endpoint may see it.
        return found or (None if self.endpoint is None else False)

    def _in_words(self, name: str, error: Exception) -> SourceError:
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

        where = self.endpoint or constants.ENDPOINT
        token = f"set {self.auth_env or f'[harness.torch.sources.{self.scheme}] auth_env'} to a token that may read it"
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, GatedRepoError):
            reason = f"is gated at {where}: accept its terms there, then {token}"
        elif status in (401, 403):
            reason = f"is private or does not exist at {where} (HTTP {status}): check the name, or {token}"
        elif status == 404:
            reason = f"does not exist at {where} (HTTP 404): check the name"
        elif status is not None:
            reason = f"could not be fetched: {where} answered HTTP {status}"
        else:
            reason = f"could not be fetched from {where}: {type(error).__name__}: {error}".splitlines()[0]
        return SourceError(f"{self.scheme}:{name} {reason}", model_id=name, cause=reason)


def chosen_files(source: str, names: Sequence[str], quant: str | None) -> list[str]:
    """Of a repository's files those that make up the model: a GGUF model, or the checkpoint and what describes it.

    Without `quant` a checkpoint is preferred; with one, the first GGUF file whose name has it (underscores aside), or
    a checkpoint that can be quantised so while it loads.

    Raises:
        SourceError: `empty_repo`, or `quant_not_found` with the nearest name.
    """
    ggufs = sorted(
        name for name in names if name.lower().endswith(".gguf") and not _file_name(name).startswith("mmproj")
    )
    # Where there is an index, a file that it cannot name holds the same weights once more.
    twice = "consolidated" if _SHARD_INDEX in names else "/"
    checkpoint = sorted(
        name for name in names if "/" not in name and name.endswith(_BESIDE_SAFETENSORS) and not name.startswith(twice)
    )
    dense = "config.json" in checkpoint and any(name.endswith(".safetensors") for name in checkpoint)
    if quant and quant.lower() != AUTO:
        matching = [name for name in ggufs if _plain(quant) in _plain(_file_name(name))]
        if matching:
            return part_names(matching[0])
        if not dense or not is_quant(quant):
            raise _quant_not_found(source, quant, ggufs, dense)
    if dense:
        return checkpoint
    if ggufs:
        return part_names(ggufs[0])
    kind = "an image model" if "model_index.json" in names else "no model files: neither .safetensors nor .gguf"
    raise SourceError(f"{source} holds {kind}", kind="empty_repo", model_id=source)


def _quant_not_found(source: str, quant: str, ggufs: Sequence[str], dense: bool) -> SourceError:
    available = [_file_name(name).removesuffix(".gguf").rpartition("-")[2] for name in ggufs]
    has = f"it has {', '.join(available)}" if available else "it has no .gguf files at all"
    if dense:
        available += NAMES
        has += f"; its checkpoint can be quantised to {', '.join(NAMES)}"
    near = difflib.get_close_matches(quant.upper(), [tag.upper() for tag in available], n=1, cutoff=0.0)
    nearest = next((tag for tag in available if near and tag.upper() == near[0]), None)
    hint = f"; did you mean {nearest}?" if nearest else ""
    return SourceError(
        f"{source} has no file of quantisation '{quant}': {has}{hint}",
        kind="quant_not_found",
        model_id=source,
        requested=quant,
        available=available,
        nearest=nearest,
    )


def _model_path(paths: Sequence[Path]) -> Path:
    return paths[0] if paths[0].suffix.lower() == ".gguf" else paths[0].parent


def _file_name(name: str) -> str:
    return PurePosixPath(name).name


def _plain(text: str) -> str:
    return text.lower().replace("_", "")


def _meter(fetch: Fetch, before: int, total: int) -> Any:
    """A stand-in for a progress bar that tells `fetch` of the bytes of one file."""

    class Meter:
        def __init__(self, *args: Any, initial: int = 0, **kwargs: Any) -> None:
            self.done = initial
            self.total = kwargs.get("total")

        def __enter__(self) -> "Meter":
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def close(self) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            self.done += int(count or 0)
            fetch.progress("download", min(before + self.done, total) if total else before + self.done, total)

        def set_postfix_str(self, *text: object, **options: object) -> None:
            pass

    return Meter
