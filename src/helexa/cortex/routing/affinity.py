"""Prefix-cache affinity: assigns requests with the same session or the same beginning of the prompt to the same node.

Prompts with a common beginning are cheapest on the node that has this beginning in its prefix cache. The affinity key
of a request identifies its session or the beginning of its prompt. Rendezvous hashing ranks the nodes for each affinity
key. Several gateways therefore rank the nodes in the same order without communication. If a node is added or removed,
only the affinity keys that rank this node first are assigned to another node.
"""

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

SESSION_HEADER = b"x-session-id"
KEY_BYTES = 16

_MAX_SESSION_BYTES = 512
_HASHED_END_BYTES = 32 << 10
_HASHED_TEXT_BYTES = 2 << 10
# Clients move `cache_control` to later messages as a conversation grows; the text of the message does not change.
_CACHE_MARK = re.compile(rb',?\s*"cache_control"\s*:\s*\{[^{}]*\}')

_NOTHING = msgspec.Raw()


class _Beginning(msgspec.Struct):
    """The request fields of all API formats that name the session or determine the beginning of the prompt.

    Their values are not validated.
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
    """Return the affinity key of a request (`KEY_BYTES` bytes), or None if the request has none of the sources below.

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
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def rank_nodes(names: Iterable[str], model: str, key: bytes) -> list[str]:
    """Return the node names in the order of preference for a model and an affinity key (rendezvous hashing)."""
    suffix = b"\0" + model.encode("utf-8", "replace") + b"\0" + key
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
    """Add one JSON value of the prompt, such as a message, to the hash, and return the value's size in bytes.

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
