"""A key: a secret that stands for a principal. The gateway holds its digest, never the secret itself."""

import hashlib
import secrets
import string
from dataclasses import dataclass, field

from pydantic import SecretStr

from helexa.core.errors import ConfigError
from helexa.cortex.access.principal import Principal, Window
from helexa.cortex.config import EntitlementsSection, KeySection

LONGEST_SECRET = 512
_PREFIX = "hlx_"
_RANDOM_CHARS = 43  # of 62 kinds: 256 bits
_HINT_CHARS = len(_PREFIX) + 4


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        principal: whom it stands for.
        digest: sha256 of the secret, 32 bytes.
        hint: how the secret begins, for people with several; empty when it stands in cortex.toml.
        created_at: Unix seconds; 0 when it stands in cortex.toml.
        revoked_at: Unix seconds; None while it is good.
    """

    principal: Principal
    digest: bytes = field(repr=False)
    hint: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None


def new_secret() -> SecretStr:
    """A secret nobody can guess."""
    letters = string.ascii_letters + string.digits
    return SecretStr(_PREFIX + "".join(secrets.choice(letters) for _ in range(_RANDOM_CHARS)))


def digest_of(secret: bytes) -> bytes:
    """What is kept of a secret. A fast hash will do, because secrets are random."""
    return hashlib.sha256(secret).digest()


def hint_of(secret: SecretStr) -> str:
    """How a secret begins: enough to recognise it, too little to guess the rest."""
    return secret.get_secret_value()[:_HINT_CHARS]


def static_keys(entitlements: EntitlementsSection) -> list[Key]:
    """The keys that stand in cortex.toml.

    Two entries may share a `key_id`, and with it budget and limits, so that a secret can be exchanged without a gap;
    then they must differ in nothing else.

    Raises:
        ConfigError: a key is empty, too long or given twice, or entries of one `key_id` contradict each other.
    """
    keys = [_static_key(section) for section in entitlements.keys]
    named: dict[str, Principal] = {}
    for place, key in enumerate(keys, 1):
        who = f"entitlements.keys: entry {place} ('{key.principal.key_id}')"
        if any(key.digest == other.digest for other in keys[: place - 1]):
            raise ConfigError(f"{who} has the key of another entry")
        if named.setdefault(key.principal.key_id, key.principal) != key.principal:
            raise ConfigError(f"{who} says otherwise than another entry of that key_id")
    return keys


def _static_key(section: KeySection) -> Key:
    secret = section.key.get_secret_value().encode()
    key_id = section.key_id or section.account_id
    if not 0 < len(secret) <= LONGEST_SECRET or secret != secret.strip():
        raise ConfigError(f"entitlements.keys: the key of '{key_id}' is empty, too long or has blanks around it")
    for name in (section.account_id, key_id):
        if not (name.isascii() and name.isprintable()):  # they travel in headers
            raise ConfigError(f"entitlements.keys: {name!r} is not plain ASCII")
    principal = Principal(
        account_id=section.account_id,
        key_id=key_id,
        role=section.role,
        models=None if section.models is None else frozenset(section.models),
        hard_cap=section.hard_cap,
        window=Window(section.window.kind, section.window.seconds),
        requests_per_minute=section.requests_per_minute,
        tokens_per_minute=section.tokens_per_minute,
        concurrency=section.concurrency,
    )
    return Key(principal, digest_of(secret))
