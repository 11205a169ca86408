"""Authentication by API key or sign-in link, and authorization per model."""

import time
from collections.abc import Callable, Iterable

from helexa.core.errors import ApiError
from helexa.cortex.access.keys import MAX_SECRET_BYTES, Key, Principal, digest_of
from helexa.http.headers import Headers

_CREATE_ADMIN = "create one with `cortex keys create --admin`"

# What a user signed in with: the digest of an API key, or the principal of a user of an identity provider.
Credential = bytes | Principal

# Function that returns the credential of the session that a request belongs to, or None without a valid session.
FindSession = Callable[[Headers], Credential | None]


class Authenticator:
    """Authenticates requests by their API keys.

    The result depends on the key and on the setting `require_auth`:

    | key in the request      | `require_auth = false` | `require_auth = true`  |
    |-------------------------|------------------------|------------------------|
    | none                    | anonymous              | 401, missing           |
    | unknown key             | anonymous              | 401, invalid           |
    | known key               | its principal          | its principal          |
    | revoked or expired key  | 401 with the reason    | 401 with the reason    |

    A request without a key that belongs to a session of the console has the principal of the session.
    """

    def __init__(self, require_auth: bool, static: Iterable[Key] = (), clock: Callable[[], float] = time.time) -> None:
        # Finds the session of a request without a key. None if the gateway has no console.
        self.find_session: FindSession | None = None
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
        """Replace the stored keys (from the database); keys from cortex.toml stay."""
        self._stored = tuple(stored)
        self._index()

    def admit(self, headers: Headers) -> Principal | None:
        """Return the principal of a request; None for an anonymous request.

        Raises:
            ApiError: 401 if the key is missing or invalid although `require_auth` is true, or if the key is revoked or
                expired; 400 if one header has two different keys, or two headers have different known keys.
        """
        secret = shown_secret(headers, self._of_two)
        if secret is None:
            credential = None if self.find_session is None else self.find_session(headers)
            if credential is not None:
                return self.principal_of(credential)
            if self.require_auth:
                raise _unauthorized("missing API key; supply 'Authorization: Bearer <key>'")
            return None
        digest = digest_of(secret) if len(secret) <= MAX_SECRET_BYTES else b""
        if digest not in self._keys and not self.require_auth:
            return None  # many clients send a placeholder key to servers without authentication
        # A revoked or expired key is rejected even without `require_auth`, so that its owner learns that it is invalid.
        return self.principal_of(digest)

    def principal_of(self, credential: Credential) -> Principal:
        """Return the principal that a credential authenticates.

        Raises:
            ApiError: 401 if the API key is unknown, revoked or expired.
        """
        if isinstance(credential, Principal):
            return credential
        key = self._keys.get(credential)
        if key is None:
            raise _unauthorized("invalid API key; check the key, or create one with `cortex keys create`")
        if key.revoked_at is not None:
            raise _unauthorized("this API key was revoked; use another one")
        expires_at = key.principal.expires_at
        if expires_at is not None and expires_at <= self._clock():
            raise _unauthorized("this API key has expired; use another one")
        return key.principal

    def admit_key(
        self, headers: Headers, message: str = "this path requires an API key; supply 'Authorization: Bearer <key>'"
    ) -> Principal:
        """Return the principal of a request to an API that allows no anonymous requests.

        Raises:
            ApiError: 401 if the key is missing, unknown, revoked or expired; 400 as in `admit`.
        """
        principal = self.admit(headers)
        if principal is None:
            raise _unauthorized(message)
        return principal

    def admit_admin(self, headers: Headers) -> Principal:
        """Return the principal of a request to the admin API.

        Raises:
            ApiError: 401 if the key is missing, unknown, revoked or expired; 403 if the key's role is `user`; 400 as in
                `admit`.
        """
        principal = self.admit_key(headers, "this path requires an admin's API key; " + _CREATE_ADMIN)
        if principal.role != "admin":
            raise ApiError(
                403,
                "admin_only",
                "this path requires an admin's API key; the request has a user's key; " + _CREATE_ADMIN,
            )
        return principal

    def _of_two(self, first: bytes, second: bytes) -> bytes:
        # Anthropic's libraries send two keys if the environment has two. One of them may be for another server, so the
        # key that this gateway knows is used.
        known = [secret for secret in (first, second) if digest_of(secret[:MAX_SECRET_BYTES]) in self._keys]
        if len(known) > 1:
            raise _conflict()
        return known[0] if known else first

    def _index(self) -> None:
        self._keys = {key.digest: key for key in (*self._stored, *self.static)}


def shown_secret(headers: Headers, of_two: Callable[[bytes, bytes], bytes] | None = None) -> bytes | None:
    """Return the API key in `Authorization: Bearer` or `x-api-key`; None without one.

    Args:
        of_two: returns the key to use if the two headers contain different keys. If `of_two` is None, different keys
            are an error.

    Raises:
        ApiError: 400 if the two headers have different keys and `of_two` is None or raises this error, or if one header
            occurs twice with different keys. The account to charge would be ambiguous.
    """
    presented_secret: bytes | None = None
    presented_in = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, secret = value.strip().partition(b" ")
            secret = secret.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            secret = value.strip()
        else:
            continue
        if secret and presented_secret is not None and secret != presented_secret:
            if of_two is None or name == presented_in:
                raise _conflict()
            secret = of_two(presented_secret, secret)
        presented_secret, presented_in = secret or presented_secret, name
    return presented_secret


def allows(principal: Principal | None, model_id: str) -> bool:
    """Return whether a principal (None: anonymous) may list and use the model."""
    return principal is None or principal.models is None or model_id in principal.models


def authorize(principal: Principal | None, model_id: str, name: str) -> None:
    """Raise ApiError 403 `model_not_allowed` if the principal may not use a model.

    Args:
        model_id: id of the requested model. The caller has resolved an alias in the request.
        name: the model name in the request, possibly an alias; used in the error message.
    """
    # A model that does not exist gives this error, too, so that clients cannot find out which other models exist.
    if not allows(principal, model_id):
        raise ApiError(
            403,
            "model_not_allowed",
            f"this API key may not use model '{name[:200]}'; GET /v1/models lists the models of this key",
            param="model",
            model_id=name[:200],
        )


def _conflict() -> ApiError:
    return ApiError(400, "conflicting_api_keys", "the request contains two different API keys; send one of them")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message)
