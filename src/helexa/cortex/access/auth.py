"""Authentication by API key, and authorization per model."""

import time
from collections.abc import Callable, Iterable

from helexa.core.errors import ApiError
from helexa.cortex.access.key import MAX_SECRET_BYTES, Key, digest_of
from helexa.cortex.access.principal import Principal
from helexa.http.connections.request_head import Headers


class Authenticator:
    """Authenticates requests by their API keys.

    The result depends on the key and on the setting `require_auth`:

    | key in the request      | `require_auth = false` | `require_auth = true`  |
    |-------------------------|------------------------|------------------------|
    | none                    | anonymous              | 401, missing           |
    | unknown key             | anonymous              | 401, invalid           |
    | known key               | its principal          | its principal          |
    | revoked or expired key  | 401 with the reason    | 401 with the reason    |

    A principal is the account and API key of a request, with the key's limits. Many clients send a placeholder key to
    servers without authentication, so a request with an unknown key is anonymous if `require_auth` is false. A revoked
    or expired key is rejected in both modes, so that its owner learns that the key is invalid.
    """

    def __init__(self, require_auth: bool, static: Iterable[Key] = (), clock: Callable[[], float] = time.time) -> None:
        self.static: tuple[Key, ...] = ()
        self._stored: tuple[Key, ...] = ()
        self._clock = clock
        self.configure(require_auth, static)

    def configure(self, require_auth: bool, static: Iterable[Key]) -> None:
        """Set `require_auth` and replace the static keys (the keys from cortex.toml)."""
        self.require_auth = require_auth
        self.static = tuple(static)
        self._index()

    def replace(self, stored: Iterable[Key]) -> None:
        """Replace the stored keys (the keys from the database). Keys from cortex.toml stay."""
        self._stored = tuple(stored)
        self._index()

    def admit(self, headers: Headers) -> Principal | None:
        """Return the principal of a request with these headers; None for an anonymous request.

        Raises:
            ApiError: 401 if the key is missing or invalid although `require_auth` is true, or if the key is revoked or
                expired; 400 if the headers contain two different keys.
        """
        secret = shown_secret(headers)
        if secret is None:
            if self.require_auth:
                raise _unauthorized("missing API key; supply 'Authorization: Bearer <key>'")
            return None
        key = self._keys.get(digest_of(secret)) if len(secret) <= MAX_SECRET_BYTES else None
        if key is None:
            if self.require_auth:
                raise _unauthorized("invalid API key")
            return None
        if key.revoked_at is not None:
            raise _unauthorized("this API key was revoked")
        expires_at = key.principal.expires_at
        if expires_at is not None and expires_at <= self._clock():
            raise _unauthorized("this API key has expired")
        return key.principal

    def admit_admin(self, headers: Headers) -> Principal:
        """Return the principal of a request to the admin API, which allows no anonymous requests.

        Raises:
            ApiError: 401 if the key is missing, unknown, revoked or expired; 403 if the key's role is `user`; 400 if
                the headers contain two different keys.
        """
        principal = self.admit(headers)
        if principal is None:
            raise _unauthorized("this path requires an admin's API key; create one with `cortex keys create --admin`")
        if principal.role != "admin":
            raise ApiError(403, "admin_only", "this path requires an admin's API key; the request has a user's key")
        return principal

    def _index(self) -> None:
        self._keys = {key.digest: key for key in (*self._stored, *self.static)}


def shown_secret(headers: Headers) -> bytes | None:
    """Return the API key in `Authorization: Bearer` or `x-api-key`, or None if the headers contain neither.

    Raises:
        ApiError: 400 if the headers contain two different keys, because the account to charge is ambiguous.
    """
    presented_secret: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, secret = value.strip().partition(b" ")
            secret = secret.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            secret = value.strip()
        else:
            continue
        if secret and presented_secret is not None and secret != presented_secret:
            raise ApiError(400, "conflicting_api_keys", "the request contains two different API keys; send one of them")
        presented_secret = secret or presented_secret
    return presented_secret


def allows(principal: Principal | None, model_id: str) -> bool:
    """Return whether a principal may list and use the model with the id `model_id`. Aliases must be resolved before."""
    return principal is None or principal.models is None or model_id in principal.models


def authorise(principal: Principal | None, model_id: str, name: str) -> None:
    """Raise an error if the principal may not use a model.

    The error does not reveal whether the model exists.

    Args:
        principal: the principal of the request; None for an anonymous request.
        model_id: id of the requested model, with aliases resolved.
        name: the model name in the request, possibly an alias; used in the error message.

    Raises:
        ApiError: 403 `model_not_allowed` if the model is not among the key's allowed models.
    """
    if not allows(principal, model_id):
        raise ApiError(
            403,
            "model_not_allowed",
            f"this API key may not use model '{name[:200]}'",
            param="model",
            model_id=name[:200],
        )


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message)
