"""Find and download models on the Hugging Face Hub, or on another server with the Hub's protocol."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import SourceError
from helexa.neuron.cache_folder import expanded
from helexa.neuron.sources.choice import chosen_files, model_path
from helexa.neuron.sources.download import Downloads
from helexa.neuron.sources.fetch import Fetch
from helexa.neuron.sources.fetch_errors import ContentError, DiskError, disk_error, source_error
from helexa.neuron.sources.listing import Listing, request_listing
from helexa.neuron.sources.snapshot import Snapshots
from helexa.neuron.sources.transfer import retry_delay
from helexa.neuron.sources.web import Site, WebError, origin

log = logging.getLogger(__name__)

_HUB = "https://huggingface.co"
_LISTING_SECONDS = 10.0
_LISTING_ATTEMPTS = 3
_YES = ("1", "ON", "YES", "TRUE")


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default cache folder, which the Hugging Face Hub's own tools also use.

    Raises:
        ConfigError: the home folder is unknown, and no environment variable names a cache folder.
    """
    path = environ.get("HF_HUB_CACHE")
    return expanded(Path(path)) if path else _home(environ) / "hub"


@dataclass(frozen=True)
class Hub:
    """The Hugging Face Hub or another server with the Hub's protocol, and the cache of the models from this server.

    Attributes:
        scheme: scheme of source ids that refer to this hub, such as `huggingface`.
        endpoint: base URL of the server. None for the Hugging Face Hub.
        auth_env: name of the environment variable that may contain the access token. None to use no variable.
        cache_dir: cache folder, in the layout that the Hub's own tools use.
        timeout: a download fails if no data arrives for this number of seconds.
    """

    scheme: str
    endpoint: str | None
    auth_env: str | None
    cache_dir: Path
    timeout: float

    def model(self, name: str, quant: str | None, refresh: bool, downloads: Downloads, fetch: Fetch) -> Path:
        """Return the path of a repository's model, which is a GGUF file or a checkpoint folder.

        The method downloads the model if necessary. If a request to the hub fails and the cache has the complete model,
        the method returns the cached model.

        Args:
            name: name of the repository, such as `org/name`.
            quant: requested quantization, or None.
            refresh: whether to request the latest commit from the hub. If False and the cache has the complete model,
                the method sends no request.
            downloads: downloads the missing files.
            fetch: handle to report progress and to check for cancellation.

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
                missing = cached.missing or f"{self.cache_dir} has none of its files"
                reason = f"may not be fetched, since HF_HUB_OFFLINE is set, and {missing}"
                raise SourceError(f"{source} {reason}", kind="not_cached", model_id=name, cause=reason)
            return cached.path
        fetch.progress("list", 0, 0)
        site = self.site()
        try:
            listing = self._listing(site, name, fetch, attempts=1 if cached.path else _LISTING_ATTEMPTS)
            files = chosen_files(source, list(listing.files), quant)
            if absent := [file for file in files if file not in listing.files]:
                raise ContentError(f"cannot be used: the repository lacks {absent[0]}")
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
            log.warning("%s: %s", source, disk_error(error, self.cache_dir))
        return model_path(snapshots.at(listing.commit), files)

    def site(self) -> Site:
        """Return the hub's server. Requests to the server include the user's access token, if the user has a token."""
        url = self.endpoint or os.environ.get("HF_ENDPOINT") or _HUB
        return Site(url, self._token(url), self.timeout)

    def _listing(self, site: Site, name: str, fetch: Fetch, attempts: int) -> Listing:
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
        token = os.environ.get(self.auth_env, "").strip() if self.auth_env else ""
        if token or origin(url) != _HUB:
            return token or None
        # The login stored by the Hub's tools is sent to the Hub only, never to another endpoint.
        try:
            path = os.environ.get("HF_TOKEN_PATH")
            return (expanded(Path(path)) if path else _home(os.environ) / "token").read_text().strip() or None
        except (OSError, ValueError):
            return None


def _serve_cached(path: Path, failure: SourceError) -> Path:
    log.warning("%s; using the cached version", failure)
    return path


def _home(environ: Mapping[str, str]) -> Path:
    if home := environ.get("HF_HOME"):
        return expanded(Path(home))
    return expanded(Path(environ.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface"


def offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is set. These variables forbid requests to hubs."""
    return any(os.environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
