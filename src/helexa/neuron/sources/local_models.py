"""The models on this machine: in the caches and in `models_dirs`."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from helexa.core.model_source_ids import bare_id
from helexa.core.node_reports import LocalModel
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import NeuronConfig
from helexa.neuron.sources.downloaded_models import DownloadedModel, downloaded_models, hub_caches
from helexa.neuron.sources.repository_files import quant_tag
from helexa.neuron.weights.gguf.files import is_companion, part_names

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-\d{5}", re.ASCII | re.DOTALL)

MAX_DEPTH = 4  # maximum number of folders between a model folder and a model

MAX_ENTRIES = 20_000  # maximum number of directory entries that are read, in all model folders together

_SAFETENSORS = "safetensors"
# Folders of a cached repository. If the repository changes, the modification time of at least one of them changes.
_WATCHED = ("", "snapshots", "snapshots/*", "blobs", "refs")


@dataclass(frozen=True)
class FolderModel:
    """A GGUF file or a checkpoint folder in a model folder."""

    # path relative to the model folder, with `/`, without the ending `.gguf` and the part number of a split file
    name: str
    path: Path
    size: int


@dataclass
class FolderScan:
    """The models in several model folders."""

    models: list[FolderModel] = field(default_factory=list[FolderModel])
    problems: list[str] = field(default_factory=list[str])  # one line for each folder that cannot be read
    complete: bool = True  # False if a limit ended the scan
    _entries: int = 0
    _seen: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def add(self, root: Path) -> None:
        """Scan a model folder once; skip hidden entries and follow links."""
        self._scan(root, root, MAX_DEPTH)

    def _scan(self, root: Path, folder: Path, depth: int) -> None:
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in self._seen:
                return  # the folder was scanned already, for example through a link
            self._seen.add((status.st_dev, status.st_ino))
            entries = sorted(self._entries_of(folder), key=lambda entry: entry.name)
        except OSError as error:
            self.problems.append(f"{folder}: {error.strerror or error}")
            return
        names = {entry.name for entry in entries}
        if folder != root and "config.json" in names and any(name.endswith(".safetensors") for name in names):
            size = sum(_entry_size(entry) for entry in entries)
            self.models.append(FolderModel(folder.relative_to(root).as_posix(), folder, size))
            return
        sizes: Counter[str] = Counter()
        first_files: dict[str, Path] = {}
        for entry in entries:
            if _is_folder(entry):
                if depth > 1:
                    self._scan(root, Path(entry.path), depth - 1)
            elif entry.name.lower().endswith(".gguf") and not is_companion(f"{folder.name}/{entry.name}"):
                part = _PART.fullmatch(entry.name[:-5])
                model = part["stem"] if part else entry.name[:-5]
                sizes[model] += _entry_size(entry)
                if part is None or int(part["number"]) == 1:
                    first_files[model] = Path(entry.path)
        for model, path in first_files.items():
            name = path.relative_to(root).with_name(model).as_posix()
            self.models.append(FolderModel(name, path, sizes[model]))

    def _entries_of(self, folder: Path) -> Iterator["os.DirEntry[str]"]:
        with os.scandir(folder) as entries:
            for entry in entries:
                self._entries += 1
                if self._entries > MAX_ENTRIES:
                    self.complete = False
                    return
                if not entry.name.startswith("."):
                    yield entry


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _entry_size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size if entry.is_file() else 0
    except OSError:
        return 0


@dataclass(frozen=True)
class FoundModel:
    """A model on this machine. `path` is None if some of its files are missing."""

    record: LocalModel
    path: Path | None
    version: int  # modification time of `path` in nanoseconds; 0 without `path`


def cache_state(config: NeuronConfig) -> frozenset[tuple[str, int]]:
    """Return the caches' folders with modification times, to detect changes."""
    packages = cache_root(config.cache.dir) / "pypi"
    folders = [packages, *_glob(packages, "*")]
    for cache in hub_caches(config):
        folders += [cache, *(folder for part in _WATCHED for folder in _glob(cache, f"models--*/{part}".rstrip("/")))]
    return frozenset((str(folder), _modified(folder)) for folder in folders)


def cached_models(config: NeuronConfig) -> list[FoundModel]:
    """Return the models in the caches, with one element for each quantization."""
    return list(_found(entry for model in downloaded_models(config) for entry in _entries_of(model)))


def names_of(model: DownloadedModel, form: str | None) -> set[str]:
    """Return all ids of a cached model, or of its quantization `form` if not None."""
    records = [found.record for found in _found(_entries_of(model)) if form is None or found.record.form == form]
    return {name for record in records for name in (record.id, *record.names)}


def folder_models(scan: FolderScan) -> list[FoundModel]:
    """Return the models that a scan of model folders has found."""
    return list(_found(map(_folder_entry, scan.models)))


# Properties of a model: id, source id, quantization (or `safetensors`), other names, bytes, path, and why the model
# cannot be used.
_Entry = tuple[str, str, str, Iterable[str], int, Path | None, str | None]


def _found(entries: Iterable[_Entry]) -> Iterator[FoundModel]:
    """Yield the models of `entries`, except models with invalid names."""
    for name, source, form, others, size, path, problem in entries:
        model_id = bare_id(name)
        names = {name, source, *others}
        names = sorted((names | set(map(bare_id, names))) - {model_id})
        version = 0 if path is None else _modified(path)
        modified = version // 1_000_000_000 or None
        try:
            record = LocalModel(
                id=model_id,
                source=source,
                names=names,
                form=form,
                size_bytes=size,
                modified=modified,
                problem=problem,
            )
        except ValidationError:
            continue
        yield FoundModel(record, path, version)


def _entries_of(model: DownloadedModel) -> Iterator[_Entry]:
    """Yield an entry for each quantization of a model; the default has the model's id.

    Without a default, the first one also has the plain name. An incomplete model has one entry, with no path.
    """
    plain_source = model.source.partition("==")[0]
    if model.path is None:
        yield model.name, model.source, "", (plain_source,), model.size, None, f"incomplete: {model.missing}"
        return
    form = next((form for form, path in model.forms.items() if path == model.default), "")
    if model.default is not None:
        tagged = [f"{name}:{form}" for name in (model.name, model.source) if form not in ("", _SAFETENSORS)]
        size = model.size if len(model.forms) < 2 else _size(model.default)
        yield model.name, model.source, form, (plain_source, *tagged), size, model.default, None
    others = [item for item in model.forms.items() if item[1] != model.default]
    for number, (form, path) in enumerate(others):
        plain = (model.name, model.source) if model.default is None and number == 0 else ()
        yield f"{model.name}:{form}", f"{model.source}:{form}", form, plain, _size(path), path, None


def _folder_entry(model: FolderModel) -> _Entry:
    form = quant_tag(model.path.name) if model.path.suffix.lower() == ".gguf" else _SAFETENSORS
    return model.name, f"file:{model.path}", form, (str(model.path),), model.size, model.path, None


def _size(path: Path) -> int:
    files = path.glob("*") if path.is_dir() else map(path.with_name, part_names(path.name))
    return sum(file.stat().st_size for file in files if file.is_file())


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
