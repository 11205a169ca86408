"""API keys: each key is a secret that authenticates a principal (an account and the key's limits).

The gateway stores a hash of the secret, never the secret itself.
"""

import hashlib
import secrets
import string
from dataclasses import dataclass, field

from pydantic import SecretStr

from helexa.core.errors import ConfigError
from helexa.cortex.access.principal import Principal, Window
from helexa.cortex.config import EntitlementsSection, KeySection

MAX_SECRET_BYTES = 512
_PREFIX = "hlx_"
_RANDOM_CHARS = 43  # of an alphabet of 62 characters: 256 bits
_HINT_CHARS = len(_PREFIX) + 4


@dataclass(frozen=True)
class Key:
    """An API key, without its secret.

    Attributes:
        principal: the principal that the key authenticates.
        digest: SHA-256 of the secret, 32 bytes.
        hint: first characters of the secret, by which users recognize it; empty for keys in cortex.toml.
        created_at: when the key was created (Unix seconds); 0 for keys in cortex.toml.
        revoked_at: when the key was revoked (Unix seconds); None if it was not revoked.
    """

    principal: Principal
    digest: bytes = field(repr=False)
    hint: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None


def new_secret() -> SecretStr:
    """Return a new random secret."""
    alphabet = string.ascii_letters + string.digits
    return SecretStr(_PREFIX + "".join(secrets.choice(alphabet) for _ in range(_RANDOM_CHARS)))


def digest_of(secret: bytes) -> bytes:
    """Return the SHA-256 hash of a secret, under which the key is stored.

    A fast hash is sufficient because secrets are random.
    """
    return hashlib.sha256(secret).digest()


def hint_of(secret: SecretStr) -> str:
    """Return the first 8 characters of a secret: enough to recognize the secret, too few to guess it."""
    return secret.get_secret_value()[:_HINT_CHARS]


def static_keys(entitlements: EntitlementsSection) -> list[Key]:
    """Return the keys that cortex.toml defines.

    Two entries with different secrets may have the same `key_id`, so that a secret can be replaced without downtime.
    These entries share one budget and one set of limits. All their values except the secret must be equal.

    Raises:
        ConfigError: a secret is empty, too long or duplicated, a name is not ASCII, or two entries with the same
            `key_id` have different values.
    """
    keys = [_static_key(section) for section in entitlements.keys]
    principals: dict[str, Principal] = {}
    for position, key in enumerate(keys, 1):
        entry = f"entitlements.keys: entry {position} ('{key.principal.key_id}')"
        if any(key.digest == earlier.digest for earlier in keys[: position - 1]):
            raise ConfigError(f"{entry} has the key of another entry")
        if principals.setdefault(key.principal.key_id, key.principal) != key.principal:
            raise ConfigError(f"{entry} has other values than another entry with the same key_id")
    return keys


def _static_key(section: KeySection) -> Key:
    secret = section.key.get_secret_value().encode()
    key_id = section.key_id or section.account_id
    if not 0 < len(secret) <= MAX_SECRET_BYTES or secret != secret.strip():
        raise ConfigError(f"entitlements.keys: the key of '{key_id}' is empty, too long or surrounded by blanks")
    for name in (section.account_id, key_id):
        if not (name.isascii() and name.isprintable()):  # both names are sent in HTTP headers
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
