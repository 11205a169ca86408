"""Who may come in, and what they may use."""

import time
from collections.abc import Callable, Iterable

from helexa.core.errors import ApiError
from helexa.cortex.access.key import LONGEST_SECRET, Key, digest_of
from helexa.cortex.access.principal import Principal
from helexa.http.connections.request_head import Headers


class Gatekeeper:
    """Tells principals by the keys they show.

    | shown                  | `require_auth = false` | `require_auth = true` |
    |------------------------|------------------------|-----------------------|
    | nothing that is a key  | anonymous              | 401, missing          |
    | an unknown key         | anonymous              | 401, invalid          |
    | a known key            | its principal          | its principal         |
    | revoked or expired     | 401, saying which      | 401, saying which     |

    Many clients send a placeholder where no key is needed, so an unknown one is ignored there. A key that once was good
    is refused all the same: its holder means to be somebody, and should learn that they no longer are.
    """

    def __init__(self, require_auth: bool, static: Iterable[Key] = (), clock: Callable[[], float] = time.time) -> None:
        self.static: tuple[Key, ...] = ()
        self._stored: tuple[Key, ...] = ()
        self._clock = clock
        self.configure(require_auth, static)

    def configure(self, require_auth: bool, static: Iterable[Key]) -> None:
        """Exchange the static keys, at once."""
        self.require_auth = require_auth
        self.static = tuple(static)
        self._index()

    def replace(self, stored: Iterable[Key]) -> None:
        """Exchange all keys but the static ones, at once."""
        self._stored = tuple(stored)
        self._index()

    def admit(self, headers: Headers) -> Principal | None:
        """Who sent a request with these headers; None is anonymous.

        Raises:
            ApiError: 401 as above; 400 when two different keys are shown.
        """
        secret = shown_secret(headers)
        if secret is None:
            if self.require_auth:
                raise _unauthorized("missing API key; supply 'Authorization: Bearer <key>'")
            return None
        key = self._keys.get(digest_of(secret)) if len(secret) <= LONGEST_SECRET else None
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
        """The same for the admin API, where nobody is anonymous.

        Raises:
            ApiError: as `admit`; 401 without a known key; 403 with that of a user.
        """
        principal = self.admit(headers)
        if principal is None:
            raise _unauthorized("this needs an admin's API key; `cortex keys create --admin` makes one")
        if principal.role != "admin":
            raise ApiError(403, "admin_only", "this needs an admin's API key; yours is a user's")
        return principal

    def _index(self) -> None:
        self._keys = {key.digest: key for key in (*self._stored, *self.static)}


def shown_secret(headers: Headers) -> bytes | None:
    """The key in `Authorization: Bearer` or `x-api-key`.

    Raises:
        ApiError: there are two that differ: who pays is not for the gateway to guess.
    """
    shown: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, secret = value.strip().partition(b" ")
            secret = secret.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            secret = value.strip()
        else:
            continue
        if secret and shown is not None and secret != shown:
            raise ApiError(400, "conflicting_api_keys", "the request shows two different API keys; send one of them")
        shown = secret or shown
    return shown


def allows(principal: Principal | None, model_id: str) -> bool:
    """Whether somebody may use, and see, the model of this id (never an alias)."""
    return principal is None or principal.models is None or model_id in principal.models


def authorise(principal: Principal | None, model_id: str, name: str) -> None:
    """Refuse a model that a key does not allow.

    The answer is the same whether there is such a model or not.

    Args:
        principal: who asks.
        model_id: what they ask for, aliases resolved.
        name: what they called it.

    Raises:
        ApiError: 403.
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
