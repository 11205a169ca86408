"""List the downloaded models on this machine, with their sizes, and remove them."""

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import HelexaError
from helexa.core.model_source_ids import DEFAULT_SCHEME
from helexa.neuron.builtin_models import BUILTIN_MODELS
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import NeuronConfig
from helexa.neuron.processes.file_locks_and_threads import is_used, try_lock
from helexa.neuron.sources.hubs_and_sources import configured_hub
from helexa.neuron.sources.pypi import PINNED, cached_package_model
from helexa.neuron.sources.repository_files import quant_tag
from helexa.neuron.sources.snapshot import PARTIAL, Snapshots
from helexa.neuron.weights.gguf.files import part_names

_PARTIALS = f"blobs/*{PARTIAL}"
_PYPI = "pypi:"
_PACKAGE = re.compile(r"(?P<package>[a-z0-9][a-z0-9-]*)-(?P<version>[^-]+)")


@dataclass(frozen=True)
class DownloadedModel:
    """A model in a download cache of this machine. Its download may be incomplete."""

    # model id that clients use in requests: `helexa/small`, `org/name`, `mirror:org/name`, `pypi:package`, or
    # `pypi:package==version` for another version than the one to which `pypi:package` refers
    name: str
    source: str
    folder: Path
    path: Path | None  # GGUF file or checkpoint folder to load. None if files are missing.
    missing: str  # description of the missing files. Empty if the model is complete.
    # The downloaded quantizations: a dict from quantization to the path of its GGUF file. A checkpoint has the key
    # `safetensors`.
    forms: Mapping[str, Path]
    # GGUF file or checkpoint folder that `name` loads without a quantization and without a download. None if some of
    # its files are missing.
    default: Path | None
    size: int  # bytes of all its files on the disk
    fetched: float  # time of the last download, in seconds since 1970

    def answers_to(self, name: str) -> bool:
        """Return whether `name` refers to this model.

        A model has three names: its model id, its source id, and its source id without the version. `name` may also
        lack the prefix `pypi:`, because servers and `helexa ps` show the names of packages without this prefix.
        """
        names = (self.name, self.source, self.source.partition("==")[0])
        return name in (*names, *(known.removeprefix(_PYPI) for known in names))

    def obstacle(self, form: str | None = None) -> str | None:
        """Return why the model, or its quantization `form`, cannot be removed, or None.

        `form` must be a key of `forms`. A running download is no obstacle to the removal of one quantization.
        """
        paths = [*self.forms.values(), *filter(None, [self.path])] if form is None else [self.forms[form]]
        if any(map(is_used, paths)):
            return f"{self.name} is loaded by a process on this machine; unload it first"
        if form is None and any(map(_is_locked, self.folder.glob(_PARTIALS))):
            return f"{self.name} is being downloaded; cancel the download first"
        return None

    def remove(self) -> None:
        """Delete all files of the model.

        Raises:
            HelexaError: a process has loaded the model, or a process is downloading it.
        """
        self._check_removable(None)
        with ExitStack() as stack:
            for partial in self.folder.glob(_PARTIALS):
                if not try_lock(stack.enter_context(partial.open("r+b")).fileno()):
                    raise HelexaError(f"{self.name} is being downloaded; cancel the download first")
            shutil.rmtree(self.folder)

    def remove_form(self, form: str) -> None:
        """Delete the files of one quantization.

        Raises:
            HelexaError: a process has loaded the quantization.
        """
        self._check_removable(form)
        path = self.forms[form]
        contents = {part.resolve() for name in part_names(path.name) if (part := path.with_name(name)).exists()}
        for link in self.folder.glob("snapshots/*/**/*"):
            if link.resolve() in contents:
                link.unlink()
        for content in contents:
            content.unlink(missing_ok=True)

    def _check_removable(self, form: str | None) -> None:
        if (obstacle := self.obstacle(form)) is not None:
            raise HelexaError(obstacle)


def _is_locked(partial: Path) -> bool:
    try:
        with partial.open("r+b") as file:
            return not try_lock(file.fileno())
    except OSError:  # the file has just been renamed, or belongs to another user
        return False


def downloaded_models(config: NeuronConfig) -> list[DownloadedModel]:
    """Return all downloaded models in the configured caches, sorted by name.

    The function uses no network. It reads weights only to compute the checksum of a `pypi:` model whose file changed
    after the download.
    """
    default_source = config.harness.torch.default_source
    models = [*_package_models(cache_root(config.cache.dir) / "pypi")]
    for cache, scheme in hub_caches(config).items():
        models += _hub_models(cache, scheme, is_default=scheme == default_source)
    return sorted(models, key=lambda model: model.name.lower())


def hub_caches(config: NeuronConfig) -> dict[Path, str]:
    """Return the cache folders of all hubs, each with the source scheme of its hub.

    If several hubs share a folder, the result has the scheme of the first hub.
    """
    hubs = [configured_hub(config, scheme) for scheme in _schemes(config)]
    return {hub.cache_dir: hub.scheme for hub in reversed(hubs)}


def _schemes(config: NeuronConfig) -> list[str]:
    """Return the source schemes of the Hugging Face Hub and of other hubs."""
    sources = config.harness.torch.sources
    return [DEFAULT_SCHEME, *(name for name, source in sources.items() if source.endpoint and name != DEFAULT_SCHEME)]


def _hub_models(cache: Path, scheme: str, is_default: bool) -> Iterator[DownloadedModel]:
    for folder in _folders(cache):
        with suppress(OSError):  # another process may remove the folder, or its files may be unreadable
            if (model := _hub_model(cache, folder, scheme, is_default)) is not None:
                yield model


def _hub_model(cache: Path, folder: Path, scheme: str, is_default: bool) -> DownloadedModel | None:
    owner, _, rest = folder.name.removeprefix("models--").partition("--")
    if not folder.name.startswith("models--") or not rest:
        return None
    repository = f"{owner}/{rest}"
    source = f"{scheme}:{repository}"
    snapshots = Snapshots(cache, repository)
    files = [path.name for path in folder.glob("snapshots/*/**/*") if path.is_file()]
    tags = sorted(set(filter(None, map(quant_tag, files))))
    forms = {form: path for form in tags if (path := snapshots.cached(source, form).path)}
    default = snapshots.cached(source, None)
    if default.path is not None and default.path.is_dir():
        forms = {"safetensors": default.path} | forms
    path = default.path or next(iter(forms.values()), None)
    is_model = any(name.endswith((".gguf", ".safetensors")) for name in files) or any(folder.glob(_PARTIALS))
    # Other tools cache repositories without models in the same folder.
    if path is None and not is_model:
        return None
    missing = "" if path else default.missing or "a complete file"
    name = repository if is_default else source
    fetched = folder.stat().st_mtime
    return DownloadedModel(name, source, folder, path, missing, forms, default.path, _size(folder), fetched)


def _package_models(cache: Path) -> Iterator[DownloadedModel]:
    versions: dict[str, dict[str, Path]] = {}  # folders by package and version, the last download last
    for folder in sorted(_folders(cache), key=_modified):
        if (match := _PACKAGE.fullmatch(folder.name)) is not None:
            versions.setdefault(match["package"], {})[match["version"]] = folder
    for package, folders in versions.items():
        default = PINNED.get(package) or next(reversed(folders))  # the version to which `pypi:package` refers
        for version, folder in folders.items():
            with suppress(OSError):
                yield _package_model(cache, folder, package, version, is_default=version == default)


def _modified(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _package_model(cache: Path, folder: Path, package: str, version: str, *, is_default: bool) -> DownloadedModel:
    builtin = {model.source: name for name, model in BUILTIN_MODELS.items()}
    source, plain = f"{_PYPI}{package}=={version}", f"{_PYPI}{package}"
    name = builtin.get(plain, plain) if is_default else source
    path = cached_package_model(f"{package}=={version}", cache)
    form = quant_tag(path.name) if path else ""
    forms = {form: path} if path and form else {}
    missing = "" if path else "a valid model file"
    return DownloadedModel(name, source, folder, path, missing, forms, path, _size(folder), folder.stat().st_mtime)


def _folders(cache: Path) -> list[Path]:
    try:
        return [entry for entry in cache.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may remove the file
                status = Path(parent, name).lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
