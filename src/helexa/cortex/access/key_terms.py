"""Validation of a key's terms (allowed models, token cap, rate limits), for the admin API and the command line."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError
from helexa.core.wire.request import to_api_error
from helexa.cortex.access.key import Key
from helexa.cortex.access.principal import Principal, Role, Window
from helexa.cortex.config import WindowSection

# Names are used in URLs, headers and metrics.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$")]
ModelIds = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=256)]], Field(max_length=1000)]
_MAX_INTEGER = 2**53  # larger integers are not exact in JSON
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
            ApiError: 400 `malformed_json` if the body is not JSON, or 400 `invalid_request_body` with the name of an
                invalid field.
        """
        return cls._validate(cls.model_validate_json, body)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Validate values by field name, such as the options of a command line.

        Raises:
            ApiError: 400 with the name of an invalid field.
        """
        return cls._validate(cls.model_validate, fields)

    @staticmethod
    def _validate(validate: Any, values: Any) -> Any:
        try:
            return validate(values)
        except ValidationError as error:
            raise to_api_error(error) from None

    def _values(self, catalogue: Catalogue) -> dict[str, Any]:
        """Return the attributes of `Principal` that the request sets, with model aliases resolved to model ids."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        if values.get("models") is not None:
            values["models"] = frozenset(catalogue.resolve(name) for name in values["models"])
        if "window" in values:
            values["window"] = Window(self.window.kind, self.window.seconds)
        return values


class NewKey(_Terms):
    """Request to create a key. Every field except `account_id` has a default.

    The fields `models`, `hard_cap`, `window`, `requests_per_minute`, `tokens_per_minute` and `concurrency` have the
    same meaning as in `Principal`.

    Attributes:
        account_id: the account that is billed.
        key_id: name of the key; derived from `account_id` if absent.
        role: `user`, or `admin` for a key that may use the admin API.
        expires_at: when the key expires (Unix seconds); None for never.
    """

    account_id: Name
    key_id: Name | None = None
    role: Role = "user"

    def principal(self, catalogue: Catalogue) -> Principal:
        """Return the principal (account and limits) of the new key, with model aliases resolved by `catalogue`."""
        key_id = self.key_id or f"{self.account_id}-{secrets.token_hex(3)}"
        return Principal(**{**self._values(catalogue), "key_id": key_id})


class KeyChange(_Terms):
    """Request to change a key's limits. An absent field keeps its value. The value null removes a limit."""

    def apply_to(self, principal: Principal, catalogue: Catalogue) -> Principal:
        """Return `principal` with the changed limits, and with model aliases resolved by `catalogue`."""
        return replace(principal, **self._values(catalogue))


def reject_static(static: Iterable[Key], key_id: str) -> None:
    """Raise an error if cortex.toml defines the key. Such a key can only be changed in cortex.toml.

    `static` are the keys from cortex.toml.

    Raises:
        ApiError: 409 `static_key` if the key is defined in cortex.toml.
    """
    if any(key.principal.key_id == key_id for key in static):
        raise ApiError(409, "static_key", f"key '{key_id}' is defined in cortex.toml; change it there", param="key_id")


def key_json(key: Key, source: str = "database") -> dict[str, Any]:
    """Return a key as a JSON object for the admin API, without its secret.

    `source` says where the key is defined: in the database or in cortex.toml.
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
