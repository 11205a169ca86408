"""`cortex check`: validates the configuration and shows the models and nodes that a gateway would serve."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from helexa.core import catalogue
from helexa.core.catalogue import Catalogue
from helexa.cortex.access.exposure import check_exposure
from helexa.cortex.access.key import Key, static_keys
from helexa.cortex.config import CortexConfig, load


def check(*, config: Annotated[Path, Parameter(name=["--config", "-c"])] = Path("cortex.toml")) -> None:
    """Check cortex.toml and its catalogue, and print an error or a summary. No node is contacted.

    Args:
        config: the configuration file.
    """
    settings = load(config)
    check_exposure(settings)
    keys = static_keys(settings.entitlements)
    models_catalogue = catalogue.load(settings.models_config)
    print(f"{config} is valid")
    print("\n".join(_summary(settings, models_catalogue, keys)))
    for warning in _warnings(settings, models_catalogue, keys):
        print(f"warning: {warning}")


def _summary(settings: CortexConfig, known: Catalogue, keys: list[Key]) -> Iterator[str]:
    gateway, key_policy = settings.gateway, "required" if settings.entitlements.require_auth else "not required"
    yield f"  listens on {gateway.listen}, metrics on {gateway.metrics_listen}"
    yield f"  keys are {key_policy}; {len(keys)} in this file, further keys in the ledger"
    yield f"  {len(known.models)} models and {len(known.aliases)} aliases in {settings.models_config}"
    for neuron in settings.neurons:
        kind = "" if neuron.kind == "neuron" else f", {neuron.kind}"
        yield f"  node {neuron.name}: {neuron.endpoint}{kind}{', cordoned' if neuron.cordoned else ''}"


def _warnings(settings: CortexConfig, known: Catalogue, keys: list[Key]) -> Iterator[str]:
    """Yield warnings about valid settings that are probably unintended."""
    names = {neuron.name for neuron in settings.neurons}
    if not names:
        yield "no [[neurons]] configured: every request will be rejected"
    for profile in known.models:
        if missing := sorted(set(profile.pinned_on) - names):
            yield f"model '{profile.id}' is pinned on {', '.join(missing)}, which is not a configured node"
    for key in keys:
        for model in sorted(key.principal.models or ()):
            if (target := known.resolve(model)) != model:
                yield f"key '{key.principal.key_id}' allows '{model}', an alias; write the model id '{target}'"
