"""The settable terms of a key, as the admin API and the command line accept them."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError
from helexa.core.wire.request import refusal_of
from helexa.cortex.access.key import Key
from helexa.cortex.access.principal import Principal, Role, Window
from helexa.cortex.config import WindowSection

# Names are used in URLs, headers and metrics.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$")]
ModelIds = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=256)]], Field(max_length=1000)]
_LARGEST = 2**53  # largest integer that JSON numbers represent exactly
Cap = Annotated[int, Field(ge=0, le=_LARGEST)]
Limit = Annotated[int, Field(ge=1, le=_LARGEST)]
UnixSeconds = Annotated[float, Field(ge=0, le=_LARGEST)]


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
        """Parse a request body.

        Raises:
            ApiError: 400 `malformed_json`, or `invalid_request_body` naming the field.
        """
        return cls._checked(cls.model_validate_json, body)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Validate a mapping of field values.

        Raises:
            ApiError: 400 naming the field.
        """
        return cls._checked(cls.model_validate, fields)

    @staticmethod
    def _checked(validate: Any, given: Any) -> Any:
        try:
            return validate(given)
        except ValidationError as error:
            raise refusal_of(error) from None

    def _values(self, catalogue: Catalogue) -> dict[str, Any]:
        """Return the given attributes of the principal, with model names resolved to ids."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        if values.get("models") is not None:
            values["models"] = frozenset(catalogue.resolve(name) for name in values["models"])
        if "window" in values:
            values["window"] = Window(self.window.kind, self.window.seconds)
        return values


class NewKey(_Terms):
    """A key to create. Every field except `account_id` has a default.

    Attributes:
        account_id: the account that pays.
        key_id: name of the key; derived from the account's name if absent.
        role: `user` or `admin`.
        expires_at: Unix seconds.
        The other fields are attributes of `Principal`.
    """

    account_id: Name
    key_id: Name | None = None
    role: Role = "user"

    def principal(self, catalogue: Catalogue) -> Principal:
        """Return the principal of the new key."""
        key_id = self.key_id or f"{self.account_id}-{secrets.token_hex(3)}"
        return Principal(**{**self._values(catalogue), "key_id": key_id})


class KeyChange(_Terms):
    """Terms of a key to change. Absent fields stay as they are; null removes a limit."""

    def applied(self, principal: Principal, catalogue: Catalogue) -> Principal:
        """Return the principal with the changed terms."""
        return replace(principal, **self._values(catalogue))


def refuse_static(static: Iterable[Key], key_id: str) -> None:
    """Raise if the key is defined in cortex.toml, where only the file can change it.

    Raises:
        ApiError: 409.
    """
    if any(key.principal.key_id == key_id for key in static):
        raise ApiError(409, "static_key", f"the key '{key_id}' stands in cortex.toml", param="key_id")


def described(key: Key, source: str = "database") -> dict[str, Any]:
    """Return a key as a JSON object, without its secret."""
    principal = asdict(key.principal)
    models = key.principal.models
    return principal | {
        "models": None if models is None else sorted(models),
        "source": source,
        "hint": key.hint or None,
        "created_at": key.created_at or None,
        "revoked_at": key.revoked_at,
    }
