"""`cortex check`: checks configuration files and nodes."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import orjson
from cyclopts import Parameter

from helexa.core import catalog
from helexa.core.catalog import Catalog
from helexa.cortex.access.keys import Key, static_keys
from helexa.cortex.access.proxies_exposure_and_cors import check_exposure
from helexa.cortex.config import CortexConfig, NeuronSection, load
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.upstream.client import Upstream

_PATHS = {"neuron": "/models", "openai": "/v1/models"}
_OTHER_KIND = {"neuron": "openai", "openai": "neuron"}


@dataclass(frozen=True)
class Probed:
    """The result of probing one node.

    Attributes:
        models: number of models that the node lists, or None if the probe failed.
        problem: what failed and how to fix it; empty if the probe succeeded.
    """

    models: int | None
    problem: str = ""


async def _probe_nodes(nodes: Sequence[NeuronSection]) -> list[Probed]:
    """Probe all nodes concurrently, and return their results in the order of `nodes`."""
    with closing(Upstream()) as upstream:
        client = NodeClient(upstream)
        return await asyncio.gather(*(_probe_node(client, node) for node in nodes))


async def _probe_node(client: NodeClient, node: NeuronSection) -> Probed:
    bearer = None if node.bearer is None else node.bearer.get_secret_value()
    try:
        return Probed(await _count(client, node.endpoint, node.kind, bearer))
    except NodeError as error:
        return Probed(None, await _explain(client, node, bearer, error))


async def _explain(client: NodeClient, node: NeuronSection, bearer: str | None, error: NodeError) -> str:
    if error.status in (401, 403):
        fix = "set bearer_file" if bearer is None else "the bearer in the configuration is not the node's API key"
        return f"the node answered HTTP {error.status}; {fix}"
    if error.timed_out:
        return str(error)
    parts = urlsplit(node.endpoint)
    root = f"{parts.scheme}://{parts.netloc}"
    other_kind = _OTHER_KIND[node.kind]
    for endpoint, kind, fix in (
        (node.endpoint, other_kind, f'set kind = "{other_kind}"'),
        (root, node.kind, f'set endpoint = "{root}"'),
        (root, other_kind, f'set endpoint = "{root}" and kind = "{other_kind}"'),
    ):
        if (endpoint, kind) != (node.endpoint, node.kind) and await _answers(client, endpoint, kind, bearer):
            return f"{error}; {fix}"
    if node.kind == "openai" and await _answers(client, node.endpoint, "openai", bearer, "/models"):
        return f"{error}; this server lists its models at /models, but the gateway needs an API with paths below /v1"
    return str(error)


async def _answers(client: NodeClient, endpoint: str, kind: str, bearer: str | None, path: str | None = None) -> bool:
    try:
        await _count(client, endpoint, kind, bearer, path)
    except NodeError:
        return False
    return True


async def _count(client: NodeClient, endpoint: str, kind: str, bearer: str | None, path: str | None = None) -> int:
    """Return the number of models that a server of the kind `kind` lists.

    Raises:
        NodeError: the server does not answer, or its answer is not a list of models in the format of this kind.
    """
    path = path or _PATHS[kind]
    try:
        content = orjson.loads(await client.get(endpoint, path, bearer))
    except orjson.JSONDecodeError:
        raise NodeError(f"the response of {path} is not JSON; check the endpoint and the kind of the node") from None
    models = content.get("data") if kind == "openai" and isinstance(content, dict) else content
    if not isinstance(models, list):
        raise NodeError(f"the response of {path} is not the model list of a node of kind '{kind}'; correct the kind")
    return len(models)


def check(
    *, config: Annotated[Path, Parameter(name=["--config", "-c"])] = Path("cortex.toml"), probe: bool = True
) -> None:
    """Check cortex.toml and its catalog, query each node, and print a summary.

    If a node does not answer, the command only prints a warning, because nodes may start later than the gateway.

    Args:
        config: the configuration file.
        probe: with --no-probe, no node is contacted.
    """
    settings = load(config)
    check_exposure(settings)
    keys = static_keys(settings.entitlements)
    models_catalog = catalog.load(settings.models_config)
    probed = asyncio.run(_probe_nodes(settings.neurons)) if probe else []
    print(f"{config} is valid")
    print("\n".join(_summary(settings, models_catalog, keys, probed)))
    for warning in _warnings(settings, models_catalog, keys):
        print(f"warning: {warning}")
    for neuron, outcome in zip(settings.neurons, probed, strict=False):
        if outcome.problem:
            print(f"warning: node '{neuron.name}' at {neuron.endpoint}: {outcome.problem}")


def _summary(settings: CortexConfig, known: Catalog, keys: list[Key], probed: Sequence[Probed]) -> Iterator[str]:
    gateway, key_policy = settings.gateway, "required" if settings.entitlements.require_auth else "not required"
    yield f"  listens on {gateway.listen}, metrics on {gateway.metrics_listen}"
    yield f"  keys are {key_policy}; {len(keys)} in this file, further keys in the ledger"
    yield f"  {len(known.models)} models and {len(known.aliases)} aliases in {settings.models_config}"
    for neuron, outcome in zip_longest(settings.neurons, probed):
        kind = "" if neuron.kind == "neuron" else f", {neuron.kind}"
        listed = "" if outcome is None or outcome.models is None else f", lists {outcome.models} models"
        yield f"  node {neuron.name}: {neuron.endpoint}{kind}{', cordoned' if neuron.cordoned else ''}{listed}"


def _warnings(settings: CortexConfig, known: Catalog, keys: list[Key]) -> Iterator[str]:
    """Yield warnings about valid settings that are probably unintended."""
    names = {neuron.name for neuron in settings.neurons}
    if not names:
        yield "no [[neurons]] configured: only nodes that joined (`cortex nodes list`) serve requests"
    for alias, target in known.aliases.items():
        if known.profile(target) is None:
            yield f"alias '{alias}' names '{target}', which is not in {settings.models_config}"
    for profile in known.models:
        if missing := sorted(set(profile.pinned_on) - names):
            yield f"model '{profile.id}' is pinned on {', '.join(missing)}, which is not a configured node"
    for key in keys:
        for model in sorted(key.principal.models or ()):
            if (target := known.resolve(model)) != model:
                yield f"key '{key.principal.key_id}' allows '{model}', an alias; write the model id '{target}'"
