"""What a key is made with and may be changed to, as the admin API and the command line take it."""

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

# Names travel in URLs, headers and metrics.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$")]
ModelIds = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=256)]], Field(max_length=1000)]
_LARGEST = 2**53  # what JSON numbers hold exactly
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
        """Read a request body.

        Raises:
            ApiError: 400 `malformed_json`, or `invalid_request_body` naming the field.
        """
        return cls._checked(cls.model_validate_json, body)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Read the same from values.

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
        """What was said of the principal's attributes; models by their ids, whatever they were called."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        if values.get("models") is not None:
            values["models"] = frozenset(catalogue.resolve(name) for name in values["models"])
        if "window" in values:
            values["window"] = Window(self.window.kind, self.window.seconds)
        return values


class NewKey(_Terms):
    """A key to be made: everything but the account has a default.

    Attributes:
        key_id: its name; made from the account's when absent.
        expires_at: Unix seconds.
        The others are those of `Principal`.
    """

    account_id: Name
    key_id: Name | None = None
    role: Role = "user"

    def principal(self, catalogue: Catalogue) -> Principal:
        """Whom the key will stand for."""
        key_id = self.key_id or f"{self.account_id}-{secrets.token_hex(3)}"
        return Principal(**{**self._values(catalogue), "key_id": key_id})


class KeyChange(_Terms):
    """Terms to be changed. What is absent stays, what is null is lifted."""

    def applied(self, principal: Principal, catalogue: Catalogue) -> Principal:
        """The same holder on other terms."""
        return replace(principal, **self._values(catalogue))


def refuse_static(static: Iterable[Key], key_id: str) -> None:
    """Refuse to make or change what stands in cortex.toml.

    Raises:
        ApiError: 409.
    """
    if any(key.principal.key_id == key_id for key in static):
        raise ApiError(409, "static_key", f"the key '{key_id}' stands in cortex.toml", param="key_id")


def described(key: Key, source: str = "database") -> dict[str, Any]:
    """A key as JSON shows it: everything but its secret."""
    principal = asdict(key.principal)
    models = key.principal.models
    return principal | {
        "models": None if models is None else sorted(models),
        "source": source,
        "hint": key.hint or None,
        "created_at": key.created_at or None,
        "revoked_at": key.revoked_at,
    }
