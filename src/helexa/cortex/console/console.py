"""The state of the console: its sessions, and the events for clients that watch the gateway."""

from helexa.core.errors import ApiError
from helexa.cortex.access.auth import Credential
from helexa.cortex.config import ConsoleSection
from helexa.cortex.console.event_hub import EventHub
from helexa.cortex.console.sessions import Session, Sessions
from helexa.cortex.gateway import Gateway
from helexa.http.connections.request_head import Headers

_SECS_PER_HOUR = 3600


class Console:
    """The console of one gateway.

    The constructor lets the gateway accept requests with a session cookie, and lets it report finished requests.

    Attributes:
        gateway: the gateway.
        sessions: the sessions of signed-in users.
        events: changes of nodes and finished requests.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.sessions = Sessions()
        self.events = EventHub(gateway.fleet, gateway.lifecycle, gateway.poller, lambda: gateway.catalogue)
        gateway.authenticator.find_session = self._credential
        gateway.observers.append(self.events.publish)

    @property
    def settings(self) -> ConsoleSection:
        """The current configuration of the console."""
        return self.gateway.config.console

    def check_enabled(self) -> None:
        """Raise an error if the console is disabled.

        Raises:
            ApiError: 404 `console_disabled`.
        """
        if not self.settings.enabled:
            raise ApiError(404, "console_disabled", "the console is disabled; set console.enabled to sign in")

    def session(self, headers: Headers) -> Session | None:
        """Return the session that a request's cookie names, or None. The CSRF token is not checked."""
        return self.sessions.of_cookie(headers) if self.settings.enabled else None

    def start_session(self, credential: Credential) -> tuple[str, Session]:
        """Start a session with the configured lifetime, and return the value of its cookie and the session."""
        return self.sessions.start(credential, self.settings.session_hours * _SECS_PER_HOUR)

    def _credential(self, headers: Headers) -> Credential | None:
        return self.sessions.credential(headers) if self.settings.enabled else None
