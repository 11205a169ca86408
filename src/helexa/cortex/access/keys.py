"""API keys, the principals that they authenticate, and their limits."""

import hashlib
import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError

from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError, ConfigError
from helexa.core.wire.request import to_api_error
from helexa.cortex.config import EntitlementsSection, KeySection, WindowSection

Role = Literal["user", "admin"]

MAX_SECRET_BYTES = 512
_PREFIX = "hlx_"
_RANDOM_CHARS = 43  # from an alphabet of 62 characters, which gives 256 bits
_HINT_CHARS = len(_PREFIX) + 4
_MAX_INTEGER = 2**53  # larger integers are not exact in JSON


@dataclass(frozen=True)
class Window:
    """Period in which a key's token cap counts tokens."""

    # `balance` counts all tokens that were ever used. `rolling` counts from 0 again in each new window.
    kind: Literal["balance", "rolling"] = "balance"
    seconds: int = 0  # length of a rolling window; 0 for a balance


@dataclass(frozen=True)
class Principal:
    """The account and API key that a request is billed to, with the key's limits."""

    account_id: str
    key_id: str  # name of the key in the ledger and in metrics; never the secret
    role: Role = "user"  # `user` or `admin`. Only an admin may use the admin API.
    models: frozenset[str] | None = None  # ids of the allowed models (not aliases); None means all models
    hard_cap: int | None = None  # maximum number of tokens within the window; None means no cap
    window: Window = field(default_factory=Window)  # the period in which `hard_cap` counts tokens
    requests_per_minute: int | None = None  # maximum number of requests per minute at one gateway; None means no limit
    tokens_per_minute: int | None = None  # maximum number of tokens per minute at one gateway; None means no limit
    concurrency: int | None = None  # maximum number of concurrent requests at one gateway; None means no limit
    expires_at: float | None = None  # when the key expires (Unix seconds); None means never

    def headers(self) -> dict[str, str]:
        """Return the headers that name the account and key of a request to a node."""
        return {"x-helexa-account-id": self.account_id, "x-helexa-key-id": self.key_id}


@dataclass(frozen=True)
class Key:
    """An API key, without its secret."""

    principal: Principal
    digest: bytes = field(repr=False)  # SHA-256 of the secret, 32 bytes
    hint: str = ""  # first characters of the secret, by which users recognize it; empty for keys in cortex.toml
    created_at: float = 0.0  # when the key was created (Unix seconds); 0 for keys in cortex.toml
    revoked_at: float | None = None  # when the key was revoked (Unix seconds); None if it was not revoked


def new_secret() -> SecretStr:
    """Return a new random secret."""
    alphabet = string.ascii_letters + string.digits
    return SecretStr(_PREFIX + "".join(secrets.choice(alphabet) for _ in range(_RANDOM_CHARS)))


def digest_of(secret: bytes) -> bytes:
    """Return the SHA-256 hash of a secret, under which the key is stored."""
    # A fast hash is sufficient, because a random secret of 256 bits cannot be guessed.
    return hashlib.sha256(secret).digest()


def hint_of(secret: SecretStr) -> str:
    """Return a secret's first 8 characters, by which users recognize the key."""
    return secret.get_secret_value()[:_HINT_CHARS]


def static_keys(entitlements: EntitlementsSection) -> list[Key]:
    """Return the keys that cortex.toml defines.

    Raises:
        ConfigError: a secret is empty, too long, surrounded by blanks or duplicated, a name is not printable ASCII, or
            two entries with the same `key_id` have different values.
    """
    # Two entries with different secrets may have the same `key_id`, so that a secret can be replaced without downtime.
    # These entries share one budget and one set of limits. All their values except the secret must be equal.
    keys = [_static_key(section) for section in entitlements.keys]
    principals: dict[str, Principal] = {}
    for position, key in enumerate(keys, 1):
        entry = f"entitlements.keys: entry {position} ('{key.principal.key_id}')"
        if any(key.digest == earlier.digest for earlier in keys[: position - 1]):
            raise ConfigError(f"{entry} has the same key as an earlier entry; remove one entry")
        if principals.setdefault(key.principal.key_id, key.principal) != key.principal:
            raise ConfigError(
                f"{entry} and an earlier entry with the same key_id differ in account, role or limits; "
                "make both entries equal, or change a key_id"
            )
    return keys


def _static_key(section: KeySection) -> Key:
    secret = section.key.get_secret_value().encode()
    key_id = section.key_id or section.account_id
    if not 0 < len(secret) <= MAX_SECRET_BYTES or secret != secret.strip():
        raise ConfigError(
            f"entitlements.keys: the key of '{key_id}' is empty, too long or surrounded by blanks; "
            f"write 1 to {MAX_SECRET_BYTES} bytes"
        )
    for name in (section.account_id, key_id):
        if not (name.isascii() and name.isprintable()):  # both names are sent in HTTP headers
            raise ConfigError(
                f"entitlements.keys: {name!r} has characters other than printable ASCII, which HTTP headers cannot "
                "contain; choose another name"
            )
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


# Names are used in URLs, headers and metrics.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$")]
ModelIds = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=256)]], Field(max_length=1000)]
Cap = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
Limit = Annotated[int, Field(ge=1, le=_MAX_INTEGER)]
UnixSeconds = Annotated[float, Field(ge=0, le=_MAX_INTEGER)]


class _Terms(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    models: ModelIds | None = None
    hard_cap: Cap | None = None
    window: WindowSection = Field(default_factory=WindowSection)
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrency: Limit | None = None
    expires_at: UnixSeconds | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse the JSON body of a request that creates or changes a key.

        Raises:
            ApiError: 400 `malformed_json`, or `invalid_request_body` with the name of an invalid field.
        """
        return cls._validate(cls.model_validate_json, body)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Create the request from `fields`, its values by field name.

        Raises:
            ApiError: 400 if a value is invalid.
        """
        return cls._validate(cls.model_validate, fields)

    @staticmethod
    def _validate(validate: Any, values: Any) -> Any:
        try:
            return validate(values)
        except ValidationError as error:
            raise to_api_error(error) from None

    def _values(self, catalog: Catalog) -> dict[str, Any]:
        """Return the attributes of `Principal` that the request sets."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        if values.get("models") is not None:
            values["models"] = frozenset(catalog.resolve(name) for name in values["models"])
        if "window" in values:
            values["window"] = Window(self.window.kind, self.window.seconds)
        return values


class NewKey(_Terms):
    """Request to create an API key. Every field except `account_id` has a default.

    Attributes:
        key_id: name of the key; derived from `account_id` if absent.
        role: `user`, or `admin` for a key that may use the admin API.
        expires_at: when the key expires (Unix seconds); None for never.
    """

    account_id: Name
    key_id: Name | None = None
    role: Role = "user"

    def principal(self, catalog: Catalog) -> Principal:
        """Return the principal of the new key, with resolved model aliases.

        If `key_id` is not set, each call returns another random `key_id`.
        """
        key_id = self.key_id or f"{self.account_id}-{secrets.token_hex(3)}"
        return Principal(**{**self._values(catalog), "key_id": key_id})


class KeyChange(_Terms):
    """Request to change an API key's limits.

    An absent field keeps its value. The value null removes a limit.
    """

    def apply_to(self, principal: Principal, catalog: Catalog) -> Principal:
        """Return `principal` with the changed limits and resolved model aliases."""
        return replace(principal, **self._values(catalog))


def reject_static(static: Iterable[Key], key_id: str) -> None:
    """Raise ApiError 409 if cortex.toml defines the key: it can only be changed there."""
    if any(key.principal.key_id == key_id for key in static):
        raise ApiError(409, "static_key", f"key '{key_id}' is defined in cortex.toml; change it there", param="key_id")


def key_json(key: Key, source: str = "database") -> dict[str, Any]:
    """Return a key as a JSON object for the admin API, without its secret.

    `source` says where the key is defined: `database`, or `config` for cortex.toml.
    """
    principal = asdict(key.principal)
    models = key.principal.models
    return principal | {
        "models": None if models is None else sorted(models),
        "source": source,
        "hint": key.hint or None,
        "created_at": key.created_at or None,
        "revoked_at": key.revoked_at,
    }
