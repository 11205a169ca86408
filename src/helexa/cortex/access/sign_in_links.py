"""Links that sign a browser in to the console once."""

import base64
import hmac
import secrets
import time
from collections.abc import Callable, Iterable

from helexa.core.errors import ApiError, overloaded
from helexa.cortex.access.keys import Key, digest_of

LIFETIME_SECS = 600
MAX_LINKS = 1000  # maximum number of links that one gateway accepts within `LIFETIME_SECS`
_EXPIRY_BYTES, _RANDOM_BYTES, _MAC_BYTES = 6, 8, 16
_MESSAGE_BYTES = _EXPIRY_BYTES + _RANDOM_BYTES
_RETRY_SECS = 60


def sign_in_url(gateway_url: str, secret: str, clock: Callable[[], float] = time.time) -> str:
    """Return the URL that signs a browser in once, within `LIFETIME_SECS`.

    `secret` is the secret of the API key with which the browser is signed in.
    """
    expiry_ms = int((clock() + LIFETIME_SECS) * 1000)
    message = expiry_ms.to_bytes(_EXPIRY_BYTES) + secrets.token_bytes(_RANDOM_BYTES)
    token = base64.urlsafe_b64encode(message + _mac(digest_of(secret.encode()), message)).decode()
    return f"{gateway_url}/#/link/{token}"


class SignInLinks:
    """The sign-in links that one gateway has accepted. Each link works once."""

    # A restart of the gateway forgets which links were used. Links that were made before the start are therefore
    # rejected.
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._started_ms = int(clock() * 1000)
        self._used: dict[bytes, int] = {}  # expiry of each used link (Unix ms), by the random number in the link

    def redeem(self, token: str, keys: Iterable[Key]) -> bytes:
        """Accept a link's token, and return the digest of the key that signed it.

        Raises:
            ApiError: 401 if the token is invalid, expired, used, or made before the start of the gateway; 503 if the
                gateway has accepted `MAX_LINKS` links that have not expired yet.
        """
        now_ms = int(self._clock() * 1000)
        content = _decoded(token)
        message, mac = content[:_MESSAGE_BYTES], content[_MESSAGE_BYTES:]
        signers = [key.digest for key in keys if hmac.compare_digest(mac, _mac(key.digest, message))]
        expiry_ms, number = int.from_bytes(message[:_EXPIRY_BYTES]), message[_EXPIRY_BYTES:]
        made_ms = expiry_ms - LIFETIME_SECS * 1000
        if not signers or not self._started_ms <= made_ms <= now_ms < expiry_ms or number in self._used:
            raise ApiError(
                401,
                "invalid_sign_in_link",
                "this sign-in link has expired or was used already; `helexa console` prints a new link",
            )
        self._used = {used: expiry for used, expiry in self._used.items() if expiry > now_ms}
        if len(self._used) >= MAX_LINKS:
            raise overloaded(
                f"{MAX_LINKS} sign-in links were used in {LIFETIME_SECS // 60} minutes, the limit; "
                "sign in with an API key, or try again in a minute",
                _RETRY_SECS,
            )
        self._used[number] = expiry_ms
        return signers[0]


def _mac(digest: bytes, message: bytes) -> bytes:
    return hmac.digest(digest, b"helexa console sign-in:" + message, "sha256")[:_MAC_BYTES]


def _decoded(token: str) -> bytes:
    """Return the bytes of a token.

    For a malformed token, return zeros, which fail the check of the signature.
    """
    try:
        content = base64.b64decode(token.encode("ascii"), b"-_", validate=True)
    except ValueError:
        content = b""
    return content if len(content) == _MESSAGE_BYTES + _MAC_BYTES else bytes(_MESSAGE_BYTES + _MAC_BYTES)
