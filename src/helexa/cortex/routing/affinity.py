"""What makes two requests belong together, and which node they belong to.

Requests that begin alike are cheapest where their beginning is cached. The key of a request names its session, or its
beginning; rendezvous hashing ranks the nodes for a key, so that gateways which never talk to one another agree, and a
node that comes or goes moves only its own share.
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
_HASHED_OF_A_TEXT = 2 << 10
# Clients move this mark along as a conversation grows; the message it sits in stays the same message.
_CACHE_MARK = re.compile(rb',?\s*"cache_control"\s*:\s*\{[^{}]*\}')

_NOTHING = msgspec.Raw()


class _Beginning(msgspec.Struct):
    """The members of a body that begin a prompt, in any of the dialects; the node judges what they hold."""

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
    """What names the session of a request, as `KEY_BYTES` bytes; None when nothing does.

    That is, in this order: the header `x-session-id`; `prompt_cache_key` of the body; Anthropic's `metadata.user_id`,
    which agents fill with their session; the prompt's beginning. The beginning is what every later turn of the same
    conversation repeats: tools, system, and messages up to the first of the user's, or as many as make `min_bytes`
    if that is more. A prompt that is shorter than that has no key: there is little to find in a cache. OpenAI's `user`
    is not looked at, because one user's many conversations do not begin alike. Of a bare `prompt`, which may go on
    growing, the first 2 KiB count.

    Args:
        body: a request in any dialect. What cannot be read has no key.
        headers: names in lower case.
        account: whose request it is; two accounts never share a key.
    """
    for name, value in headers:
        if name == SESSION_HEADER and 0 < len(value) <= _MAX_SESSION_BYTES:
            return _session(account, value)
    try:
        beginning = _beginning.decode(body)
        session = beginning.prompt_cache_key
        if session is None and isinstance(beginning.metadata, dict):
            session = beginning.metadata.get("user_id")
        if isinstance(session, str) and 0 < len(encoded := session.encode()) <= _MAX_SESSION_BYTES:
            return _session(account, encoded)
        return _prefix(account, beginning, min_bytes)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def ranked(names: Iterable[str], model: str, key: bytes) -> list[str]:
    """Node names, the one that a key belongs to first, then the one it would go to without that, and so on."""
    tail = b"\0" + model.encode("utf-8", "replace") + b"\0" + key
    return sorted(names, key=lambda name: blake2b(name.encode("utf-8", "replace") + tail, digest_size=8).digest())


def _session(account: str, name: bytes) -> bytes:
    digest = _digest(account, b"session")
    digest.update(name)
    return digest.digest()


def _prefix(account: str, beginning: _Beginning, min_bytes: int) -> bytes | None:
    digest, size = _digest(account, b"prefix"), 0
    for part in (beginning.tools, beginning.system, beginning.instructions):
        size += _feed(digest, bytes(part))
    turns = bytes(beginning.messages) or bytes(beginning.input)
    if turns[:1] != b"[":  # one text
        size += _feed(digest, turns or bytes(beginning.prompt)[: max(min_bytes, _HASHED_OF_A_TEXT)])
        return digest.digest() if size >= min_bytes else None
    asked = False
    for message in _messages.decode(turns):
        size += _feed(digest, bytes(message))
        asked = asked or _message.decode(message).role == "user"
        if asked and size >= min_bytes:
            return digest.digest()
    return None


def _digest(account: str, kind: bytes) -> blake2b:
    digest = blake2b(digest_size=KEY_BYTES, person=kind)
    digest.update(account.encode() + b"\0")
    return digest


def _feed(digest: blake2b, part: bytes) -> int:
    """Hash one part of a prompt; its size in bytes. Of a very long one, both ends stand for the whole."""
    if b'"cache_control"' in part:
        part = _CACHE_MARK.sub(b"", part)
    size = len(part)
    digest.update(b"%d:" % size)
    if size > 2 * _HASHED_END_BYTES:
        part = part[:_HASHED_END_BYTES] + part[-_HASHED_END_BYTES:]
    digest.update(part)
    return size
