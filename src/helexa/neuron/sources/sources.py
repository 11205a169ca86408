"""Find or download the model of a source id, for all types of sources."""

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from helexa.core.errors import ConfigError, SourceError
from helexa.core.source import DEFAULT_SCHEME, ModelSource
from helexa.neuron.cache_folder import cache_root, expanded
from helexa.neuron.config import MOST_DOWNLOADS, NeuronConfig, SourceConfig
from helexa.neuron.sources.download import Downloads
from helexa.neuron.sources.fetch import Fetch, ProgressReport
from helexa.neuron.sources.fetch_errors import disk_error, source_error
from helexa.neuron.sources.hub import Hub, default_cache
from helexa.neuron.sources.local import local_model
from helexa.neuron.sources.pypi import packaged_model

_MAX_FETCHES = 16
_DEFAULT_DOWNLOADS = 8
_LIMIT_NAMES = ("HELEXA_MAX_CONCURRENT_DOWNLOADS", "MAX_CONCURRENT_DOWNLOADS")


class Sources:
    """Finds or downloads models, according to the node's configuration.

    Args:
        config: the node's configuration.
        refresh: whether to request the latest commit from a hub each time. If False, a complete cached model is used
            without a request.
    """

    def __init__(self, config: NeuronConfig, *, refresh: bool = True) -> None:
        self._refresh = refresh
        self._config = config
        self._downloads = Downloads(config.downloads.max_concurrent or _limit(os.environ))
        # A separate thread pool, because a download may occupy a thread for hours.
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="fetch")

    async def resolve(self, source: ModelSource, *, quant: str | None, progress: ProgressReport) -> Path:
        """Return the GGUF file or checkpoint folder of `source` on this machine. Download the model if necessary.

        Args:
            source: source of the model.
            quant: requested quantization, such as `q4_k_m`, or None. Ignored if `source` includes a quantization.
            progress: function that receives progress reports. The function is called in the event loop.

        Raises:
            SourceError: the model is not available. `kind` is the reason.
            ConfigError: the cache folder is unknown.
        """
        loop = asyncio.get_running_loop()

        def report(stage: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(progress, stage, done, total)

        fetch = Fetch(report)
        try:
            # Local files do not wait for downloads.
            threads = None if source.scheme == "file" else self._threads
            return await loop.run_in_executor(threads, self._fetcher(source, source.quant(quant)), fetch)
        except OSError as error:
            folder = Path(error.filename or cache_root(self._config.cache.dir))
            raise source_error(disk_error(error, folder), str(source)) from error
        finally:
            fetch.abandon()

    def _fetcher(self, source: ModelSource, quant: str | None) -> Callable[[Fetch], Path]:
        match source.scheme:
            case "file":
                return lambda fetch: local_model(source.name)
            case "pypi":
                return partial(packaged_model, source.name, cache_root(self._config.cache.dir) / "pypi")
            case scheme:
                return partial(self.hub(scheme).model, source.name, quant, self._refresh, self._downloads)

    def hub(self, scheme: str) -> Hub:
        """Return the hub for source ids with the scheme `scheme`.

        Raises:
            SourceError: the scheme is unknown. `kind` is `invalid_source`.
            ConfigError: the cache folder is unknown.
        """
        return configured_hub(self._config, scheme)


def configured_hub(config: NeuronConfig, scheme: str) -> Hub:
    """Return the hub that `config` defines for source ids with the scheme `scheme`.

    Raises:
        SourceError: the scheme is unknown. `kind` is `invalid_source`.
        ConfigError: the cache folder is unknown.
    """
    harness, timeout = config.harness.torch, config.downloads.stall_secs
    configured = harness.sources.get(scheme)
    if scheme == DEFAULT_SCHEME:
        configured = configured or SourceConfig()
        folder = configured.cache_dir or harness.hf_cache
        cache = expanded(folder) if folder else default_cache()
        return Hub(scheme, configured.endpoint, configured.auth_env or "HF_TOKEN", cache, timeout)
    if configured is None or configured.endpoint is None:
        known = ", ".join(sorted({"file", "pypi", DEFAULT_SCHEME, *harness.sources}))
        raise SourceError(
            f"unknown source '{scheme}'; known: {known}; set [harness.torch.sources.{scheme}] endpoint",
            kind="invalid_source",
            model_id=scheme,
        )
    # Different hubs may have different repositories of the same name, so each hub has a separate cache.
    cache = expanded(configured.cache_dir) if configured.cache_dir else cache_root(config.cache.dir) / scheme
    return Hub(scheme, configured.endpoint, configured.auth_env, cache, timeout)


def _limit(environ: Mapping[str, str]) -> int:
    """Return the maximum number of concurrent downloads from the environment, or the default.

    Raises:
        ConfigError: the variable's value is not a number from 1 to 64.
    """
    name = next((name for name in _LIMIT_NAMES if name in environ), None)
    if name is None:
        return _DEFAULT_DOWNLOADS
    text = environ[name]
    if not text.isdecimal() or not 1 <= int(text) <= MOST_DOWNLOADS:
        raise ConfigError(f"{name}: '{text}' is not a number from 1 to {MOST_DOWNLOADS}")
    return int(text)
