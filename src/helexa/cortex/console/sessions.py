"""Sessions of signed-in users. A session cookie stands for an API key or for a user of an identity provider.

A browser sends cookies with every request to the gateway, also with requests that another site's page makes it send. A
cookie alone therefore proves nothing. A request belongs to a session only if it also has the session's CSRF token in
the header `x-helexa-csrf`, which pages of other origins can neither read nor send.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from helexa.cortex.access.auth import Credential
from helexa.http.connections.request_head import Headers
from helexa.http.origin import host_and_origin, is_same_origin

COOKIE = "helexa_session"
CSRF_HEADER = "x-helexa-csrf"
MAX_SESSIONS = 1000
MAX_SESSIONS_PER_CREDENTIAL = 50

_TOKEN_BYTES = 32
_MAX_COOKIE_BYTES = 4096
_CSRF_HEADER = CSRF_HEADER.encode()
_COOKIE_PREFIX = COOKIE.encode() + b"="


@dataclass(frozen=True)
class Session:
    """One sign-in of a user in one browser.

    Attributes:
        credential: the digest of the API key, or the principal of a user of an identity provider.
        csrf: token that a request must send in the header `x-helexa-csrf` in addition to the cookie.
        expires_at: when the session ends (Unix seconds).
    """

    credential: Credential
    csrf: str
    expires_at: float


class Sessions:
    """The sessions of one gateway, in memory. A restart of the gateway ends all sessions.

    The number of sessions is limited. A new session replaces the oldest session if there are `MAX_SESSIONS`, or if the
    credential has `MAX_SESSIONS_PER_CREDENTIAL`. Session ids are stored as hashes.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}  # by hash of the id, oldest first

    def __len__(self) -> int:
        """Return the number of sessions, including expired sessions that are not removed yet."""
        return len(self._sessions)

    def start(self, credential: Credential, lifetime_secs: float) -> tuple[str, Session]:
        """Start a session, and return its id, which is the value of the cookie, and the session."""
        now = self._clock()
        self._sessions = {id: session for id, session in self._sessions.items() if session.expires_at > now}
        same = [id for id, session in self._sessions.items() if session.credential == credential]
        if len(same) >= MAX_SESSIONS_PER_CREDENTIAL:
            del self._sessions[same[0]]
        elif len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        session = Session(credential, secrets.token_urlsafe(_TOKEN_BYTES), now + lifetime_secs)
        self._sessions[_digest(token.encode())] = session
        return token, session

    def end(self, headers: Headers) -> None:
        """End the session that the cookie of a request names."""
        if (token := _cookie(headers)) is not None:
            self._sessions.pop(_digest(token), None)

    def of_cookie(self, headers: Headers) -> Session | None:
        """Return the session that the cookie of a request names, without a check of the CSRF token.

        Return None for a request of a page of another origin.
        """
        token = _cookie(headers)
        session = None if token is None or is_foreign(headers) else self._sessions.get(_digest(token))
        return None if session is None or session.expires_at <= self._clock() else session

    def credential(self, headers: Headers) -> Credential | None:
        """Return the credential of the session that a request belongs to.

        Return None if the request has no valid cookie, a wrong CSRF token, or comes from a page of another origin.
        """
        csrf = next((value for name, value in headers if name == _CSRF_HEADER), None)
        if csrf is None:
            return None
        session = self.of_cookie(headers)
        matches = session is not None and hmac.compare_digest(csrf, session.csrf.encode())
        return session.credential if session is not None and matches else None


def is_foreign(headers: Headers) -> bool:
    """Return whether a request comes from a page of another origin, according to `Origin` and `Sec-Fetch-Site`."""
    host, origin = host_and_origin(headers)
    site = next((value for name, value in headers if name == b"sec-fetch-site"), b"")
    return (origin != b"" and not is_same_origin(origin, host)) or site not in (b"", b"same-origin", b"none")


def _cookie(headers: Headers) -> bytes | None:
    for name, value in headers:
        if name == b"cookie" and len(value) <= _MAX_COOKIE_BYTES:
            for pair in value.split(b";"):
                if (pair := pair.strip()).startswith(_COOKIE_PREFIX):
                    return pair[len(_COOKIE_PREFIX) :]
    return None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
