"""Choice of the node for a request, with prefix-cache affinity.

`route` is a pure function of a `FleetView`.

Prefix-cache affinity: prompts with a common beginning are cheapest on the node that has this beginning in its prefix
cache. The affinity key of a request identifies its session or the beginning of its prompt. Rendezvous hashing ranks the
nodes for each affinity key, so several gateways rank the nodes in the same order without communication, and a change of
the nodes moves only the keys of the changed node.
"""

import random
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from helexa.core.errors import ApiError, model_not_found, service_unavailable
from helexa.cortex.config import RoutingSection
from helexa.cortex.fleet.breaker import ANY
from helexa.cortex.fleet.ejection import ANYONE, Requester
from helexa.cortex.fleet.fleet_view import FleetView, Node

WARM = ("loaded", "reloading")
RETRY_OPEN = 3
RETRY_UNREPORTED = 3

_LONGEST_NAME = 64
# Where a node has the prompt in its cache, in the order of preference. An empty string means that the node is
# not known to have the prompt.
_TIERS = ("memory", "disk", "")

Choose = Callable[[Sequence[Node]], Node]

SESSION_HEADER = b"x-session-id"
KEY_BYTES = 16

_MAX_SESSION_BYTES = 512
_HASHED_END_BYTES = 32 << 10
_HASHED_TEXT_BYTES = 2 << 10
# Clients move `cache_control` to later messages as a conversation grows. It is removed before a message is hashed, so
# that the hash of an unchanged text stays.
_CACHE_MARK = re.compile(rb',?\s*"cache_control"\s*:\s*\{[^{}]*\}')

_NOTHING = msgspec.Raw()


class WarmRoute(msgspec.Struct, frozen=True):
    """Decision to forward a request to a node that has the model loaded."""

    model: str
    node: str  # the node's name
    url: str  # base URL of the model's API
    reason: str = ""  # value of the header `x-helexa-route`: short ASCII text that explains the choice
    kind: str = "neuron"  # kind of the node: `neuron`, or `openai` for a third-party server


def route(
    view: FleetView,
    model: str,
    key: bytes | None = None,
    settings: RoutingSection | None = None,
    choose: Choose = random.choice,
    avoid: Collection[str] = (),
    requester: Requester = ANYONE,
) -> WarmRoute | None:
    """Return the node for a request for `model`, or None if no node accepts it.

    The load of a node is its number of requests for the model. With an affinity key, a node is eligible if its load is
    at most the average load times `affinity_load_factor`, plus one. An eligible node that has the prompt in its cache
    is preferred. Otherwise the first eligible node in the key's rendezvous order is chosen. Without a key, the node
    with the lowest load is chosen. Nodes that failed, were busy or answered no polls recently, and nodes that are
    ejected for the requester, are chosen only if no other node has the model.

    Args:
        key: affinity key of the request from `affinity_key`, or None.
        choose: chooses one of several nodes that have the same lowest number of requests.
        avoid: names of nodes that were already tried.
        requester: client and API path of the request.
    """
    serving_nodes = candidates(view, model, avoid, requester.client)
    if not serving_nodes:
        return None
    preferred_nodes = serving_nodes if len(serving_nodes) == 1 else _preferred(serving_nodes, view, model, requester)
    node, cause = _choose_node(view, preferred_nodes, model, key, settings or RoutingSection(), choose)
    load = view.load(node, model)
    reason = f"node={_ascii(node.name)}; why={cause}; load={load}; candidates={len(serving_nodes)}"
    return WarmRoute(model, node.name, node.url(model), reason, node.kind)


def _preferred(nodes: list[Node], view: FleetView, model: str, requester: Requester) -> list[Node]:
    """Return the calm nodes that are not ejected.

    A calm node has not failed or been busy recently, and answers its polls. If no node is both calm and not ejected,
    return the nodes that are not ejected. If all nodes are ejected, return all nodes.
    """
    trusted_nodes = [node for node in nodes if not view.is_ejected(node.name, model, requester)]
    calm_nodes = [
        node for node in trusted_nodes if (node.name, model) not in view.cooling_down and not node.is_unresponsive
    ]
    # If no better node is left, a request goes to a busy node and waits there. It does not fail at once.
    return calm_nodes or trusted_nodes or nodes


def candidates(view: FleetView, model: str, avoid: Collection[str] = (), client: str = ANY) -> list[Node]:
    """Return the nodes that may get a client's request for `model` now.

    The nodes named in `avoid` are left out. Each returned node has the model loaded, is not cordoned, is not about to
    unload the model, and has no open circuit breaker for the model and the client.
    """
    return [
        node
        for node in view.nodes
        if has_warm(node, model)
        and not node.cordoned
        and node.name not in avoid
        and (node.name, model) not in view.draining
        and not view.is_open(node.name, model, client)
    ]


def has_warm(node: Node, model: str) -> bool:
    """Return whether a node is up and can serve requests for `model` without a load."""
    if not node.healthy:
        return False
    info = node.models.get(model)
    return info is not None and info.status in WARM and (info.servable is None or info.servable.ok)


def breaker_error(view: FleetView, model: str, client: str = ANY) -> ApiError | None:
    """Return the 503 error for a model with an open circuit breaker, or None.

    Call this function if `route` has found no node. The result is an error if a node has the model loaded, but its
    breaker for the model and the client is open.
    """
    # If a breaker is open, the gateway does not load the model on another node, because a load takes longer than the
    # time until the breaker admits the next probe request.
    if any(
        view.is_open(node.name, model, client) and has_warm(node, model) and not node.cordoned for node in view.nodes
    ):
        return service_unavailable(
            f"requests for model '{model}' keep failing on every node that has it; see the nodes' logs", RETRY_OPEN
        )
    return None


def unknown_model(view: FleetView, name: str) -> ApiError:
    """Return the error for a model that is neither in the catalog nor on a node.

    The status is 404, or 503 if a node has not reported its models yet.
    """
    # A node that has not answered a poll yet may have the model, so 404 would be wrong.
    silent_nodes = [node.name for node in view.nodes if not node.polled]
    if silent_nodes:
        message = (
            f"model '{name[:200]}' is unknown, but node '{silent_nodes[0]}' has not reported its models yet; "
            f"retry in {RETRY_UNREPORTED} s"
        )
        return service_unavailable(message, RETRY_UNREPORTED)
    return model_not_found(name[:200])


def _choose_node(
    view: FleetView, nodes: list[Node], model: str, key: bytes | None, settings: RoutingSection, choose: Choose
) -> tuple[Node, str]:
    if len(nodes) == 1:
        return nodes[0], "only"
    loads = {node.name: view.load(node, model) for node in nodes}
    if key is not None and settings.affinity:
        affinity_bound = settings.affinity_load_factor * sum(loads.values()) / len(loads) + 1
        ranking = rank_nodes(loads, model, key)
        tiers = {node.name: _tier(node, model, prefix_name(key)) for node in nodes}
        # `allowed` is never empty, because the lowest load is always within the bound. A node that has the prompt in
        # memory comes before a node that has it on disk.
        allowed = [name for name in ranking if loads[name] <= affinity_bound]
        name = min(allowed, key=lambda name: _TIERS.index(tiers[name]))
        node = next(node for node in nodes if node.name == name)
        return node, tiers[name] or ("affinity" if name == ranking[0] else "overflow")
    least_load = min(loads.values())
    return choose([node for node in nodes if loads[node.name] == least_load]), "least-busy"


def prefix_name(key: bytes) -> str:
    """Return the name that nodes report for prompts with this affinity key."""
    return key[:8].hex()


def _tier(node: Node, model: str, name: str) -> str:
    """Return where `node` has cached the prompt `name`: an element of `_TIERS`."""
    for load in node.health.models if node.health is not None else ():
        if load.id == model:
            return "memory" if name in load.memory_prefixes else "disk" if name in load.disk_prefixes else ""
    return ""


def _ascii(name: str) -> str:
    if name.isascii() and name.isprintable() and ";" not in name:
        return name[:_LONGEST_NAME]
    return "".join(char if char.isascii() and char.isprintable() and char != ";" else "?" for char in name)[
        :_LONGEST_NAME
    ]


class _Beginning(msgspec.Struct):
    """The request fields, of all API formats, that identify the session or the prompt.

    The values are not validated.
    """

    prompt_cache_key: Any = None
    metadata: Any = None
    tools: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING


class _Message(msgspec.Struct):
    role: Any = None


_beginning = msgspec.json.Decoder(_Beginning)
_message = msgspec.json.Decoder(_Message)
_messages = msgspec.json.Decoder(list[msgspec.Raw])


def affinity_key(
    body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), account: str = "", min_bytes: int = 1024
) -> bytes | None:
    """Return the affinity key of a request (`KEY_BYTES` bytes); None without a source.

    The key is derived from the first of these sources that the request contains:

    1. The header `x-session-id`.
    2. The field `prompt_cache_key`.
    3. Anthropic's field `metadata.user_id`, in which agents send the id of their session.
    4. The beginning of the prompt: the tools, the system prompt, the messages up to the first user message, and as many
       later messages as are needed to reach `min_bytes`. Every later request of the conversation repeats this
       beginning. A shorter prompt has no key, because the cache can save little. A plain `prompt` string may grow, so
       the key covers only its first 2 KiB (or `min_bytes`, if larger).

    OpenAI's field `user` is not used, because conversations of one user have different beginnings.

    Args:
        body: a request body in any API format. A malformed body has no key.
        headers: the request headers, with names in lower case.
        account: account of the request. It is part of the key, so requests of different accounts never have the same
            key.
        min_bytes: minimum length in bytes of a prompt from which a key is derived.
    """
    for name, value in headers:
        if name == SESSION_HEADER and 0 < len(value) <= _MAX_SESSION_BYTES:
            return _session(account, value)
    try:
        prompt_start = _beginning.decode(body)
        session = prompt_start.prompt_cache_key
        if session is None and isinstance(prompt_start.metadata, dict):
            session = prompt_start.metadata.get("user_id")
        if isinstance(session, str) and 0 < len(encoded := session.encode()) <= _MAX_SESSION_BYTES:
            return _session(account, encoded)
        return _prefix(account, prompt_start, min_bytes)
    # A malformed body has no key, but is forwarded, because the node's error response describes the error in detail.
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def rank_nodes(names: Iterable[str], model: str, key: bytes) -> list[str]:
    """Return the node names in rendezvous order for a model and a key, best first."""
    suffix = b"\0" + model.encode("utf-8", "replace") + b"\0" + key
    # Each node's hash depends only on its own name, the model and the key. If a node is added or removed, the order of
    # the other nodes stays.
    return sorted(names, key=lambda name: blake2b(name.encode("utf-8", "replace") + suffix, digest_size=8).digest())


def _session(account: str, name: bytes) -> bytes:
    digest = _digest(account, b"session")
    digest.update(name)
    return digest.digest()


def _prefix(account: str, beginning: _Beginning, min_bytes: int) -> bytes | None:
    digest, size = _digest(account, b"prefix"), 0
    for prefix_part in (beginning.tools, beginning.system, beginning.instructions):
        size += _feed(digest, bytes(prefix_part))
    messages = bytes(beginning.messages) or bytes(beginning.input)
    if messages[:1] != b"[":  # a single string
        size += _feed(digest, messages or bytes(beginning.prompt)[: max(min_bytes, _HASHED_TEXT_BYTES)])
        return digest.digest() if size >= min_bytes else None
    has_user_turn = False
    for message in _messages.decode(messages):
        size += _feed(digest, bytes(message))
        has_user_turn = has_user_turn or _message.decode(message).role == "user"
        if has_user_turn and size >= min_bytes:
            return digest.digest()
    return None


def _digest(account: str, kind: bytes) -> blake2b:
    digest = blake2b(digest_size=KEY_BYTES, person=kind)
    digest.update(account.encode() + b"\0")
    return digest


def _feed(digest: blake2b, data: bytes) -> int:
    """Add one JSON value of the prompt to the hash, and return its size in bytes.

    `cache_control` members are removed first. Of a value longer than 64 KiB, only the first and the last 32 KiB are
    hashed.
    """
    if b'"cache_control"' in data:
        data = _CACHE_MARK.sub(b"", data)
    size = len(data)
    digest.update(b"%d:" % size)
    if size > 2 * _HASHED_END_BYTES:
        data = data[:_HASHED_END_BYTES] + data[-_HASHED_END_BYTES:]
    digest.update(data)
    return size
