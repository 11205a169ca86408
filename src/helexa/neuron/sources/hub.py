"""Sources with the Hugging Face Hub's protocol: list the files, choose the model's files, download the chosen files."""

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
from helexa.neuron.sources.listing import Listing, listing_of
from helexa.neuron.sources.snapshot import Snapshots
from helexa.neuron.sources.transfer import pause
from helexa.neuron.sources.trouble import ContentError, DiskError, disk_error, refusal
from helexa.neuron.sources.web import Site, WebError, origin

log = logging.getLogger(__name__)

_HUB = "https://huggingface.co"
_LISTING_SECONDS = 10.0
_LISTING_TRIES = 3
_YES = ("1", "ON", "YES", "TRUE")


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder that all tools of the Hub share.

    Raises:
        ConfigError: the home folder is unknown, and no variable names a cache folder.
    """
    named = environ.get("HF_HUB_CACHE")
    return expanded(Path(named)) if named else _home(environ) / "hub"


@dataclass(frozen=True)
class Hub:
    """A hub.

    Attributes:
        scheme: source scheme of the hub.
        endpoint: base URL; None for the Hugging Face Hub.
        auth_env: environment variable that may hold the token.
        cache_dir: cache folder, in the layout of the Hub's own tools.
        patience: seconds without data after which a download counts as broken.
    """

    scheme: str
    endpoint: str | None
    auth_env: str | None
    cache_dir: Path
    patience: float

    def model(self, name: str, quant: str | None, refresh: bool, downloads: Downloads, fetch: Fetch) -> Path:
        """Return the path of a repository's model: its GGUF file or its checkpoint folder.

        A cached model is used if the hub fails. Without `refresh`, a cached model is used without asking the hub.

        Raises:
            SourceError: `repo_fetch_failed`, `repo_refused`, `not_cached`, `empty_repo`, `quant_not_found`,
                `invalid_source`, `disk_full`, `cache_unwritable` or `cache_failed`.
        """
        source = f"{self.scheme}:{name}"
        snapshots = Snapshots(self.cache_dir, name)
        kept = snapshots.kept(source, quant)
        if kept.path is not None and not refresh:
            return kept.path
        if offline():
            if kept.path is None:
                lack = kept.lack or f"nothing of it is in {self.cache_dir}"
                reason = f"may not be fetched, since HF_HUB_OFFLINE is set, and {lack}"
                raise SourceError(f"{source} {reason}", kind="not_cached", model_id=name, cause=reason)
            return kept.path
        fetch.progress("list", 0, 0)
        site = self.site()
        try:
            listing = self._listing(site, name, fetch, tries=1 if kept.path else _LISTING_TRIES)
            files = chosen_files(source, list(listing.files), quant)
            if lost := [file for file in files if file not in listing.files]:
                raise ContentError(f"cannot be used: the repository lacks {lost[0]}")
            downloads.fetch(site, name, listing, files, snapshots, fetch)
        except SourceError as error:
            if kept.path is None:
                raise
            return _served(kept.path, error)
        except (WebError, ContentError, DiskError) as error:
            setting = self.auth_env or f"[harness.torch.sources.{self.scheme}] auth_env"
            refused = refusal(error, source, token=setting, has_token=site.has_token, lack=kept.lack)
            if kept.path is None:
                raise refused from error
            return _served(kept.path, refused)
        try:
            snapshots.pin(listing.commit)
        except OSError as error:
            log.warning("%s: %s", source, disk_error(error, self.cache_dir))
        return model_path(snapshots.at(listing.commit), files)

    def site(self) -> Site:
        """Return the server of the hub."""
        url = self.endpoint or os.environ.get("HF_ENDPOINT") or _HUB
        return Site(url, self._token(url), self.patience)

    def _listing(self, site: Site, name: str, fetch: Fetch, tries: int) -> Listing:
        """List the repository. Retry if the hub is overloaded; raise at once if the hub is unreachable."""
        failures = 0
        while True:
            try:
                return listing_of(site, name, min(self.patience, _LISTING_SECONDS))
            except WebError as error:
                failures += 1
                seconds = pause(failures, error)
                if seconds is None or failures == tries or error.status is None:
                    raise
                fetch.wait(seconds)

    def _token(self, url: str) -> str | None:
        found = os.environ.get(self.auth_env, "").strip() if self.auth_env else ""
        if found or origin(url) != _HUB:
            return found or None
        # The login stored by the Hub's tools is sent to the Hub only, never to another endpoint.
        try:
            named = os.environ.get("HF_TOKEN_PATH")
            return (expanded(Path(named)) if named else _home(os.environ) / "token").read_text().strip() or None
        except (OSError, ValueError):
            return None


def _served(path: Path, refused: SourceError) -> Path:
    log.warning("%s; it is served from the cache, as it was when it was fetched", refused)
    return path


def _home(environ: Mapping[str, str]) -> Path:
    if home := environ.get("HF_HOME"):
        return expanded(Path(home))
    return expanded(Path(environ.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface"


def offline() -> bool:
    """Return whether models come from the cache only."""
    return any(os.environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
