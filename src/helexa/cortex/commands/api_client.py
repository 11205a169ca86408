"""Client for a running gateway's API, used by the command line."""

import os
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Parameter

from helexa.core.errors import HelexaError
from helexa.core.text_table import printable

TIMEOUT_SECS = 10.0

_DEFAULT_URL = "http://127.0.0.1:31313"


class Unreachable(HelexaError):
    """The endpoint did not respond, or its response is not HTTP or not JSON."""

    exit_code = 3


class Refused(HelexaError):
    """The gateway responded with an error. The exception's message contains the message of the error response."""


@Parameter(name="*")
@dataclass(frozen=True)
class GatewayApi:
    """Client for the API of a running gateway.

    Attributes:
        url: base URL of the gateway, which may end in /v1, else HELEXA_BASE_URL, else http://127.0.0.1:31313.
        former_url: former name of the option `--url`.
        key: API key, if the gateway requires one; set HELEXA_API_KEY instead, which other users of the host cannot see.
    """

    url: Annotated[str | None, Parameter(name="--url")] = None
    key: Annotated[str | None, Parameter(env_var="HELEXA_API_KEY")] = field(default=None, repr=False)
    former_url: Annotated[str | None, Parameter(name=["--endpoint", "-e"], show=False)] = None

    @property
    def endpoint(self) -> str:
        """The base URL of the gateway without `/v1`."""
        url = self.url or self.former_url or os.environ.get("HELEXA_BASE_URL") or _DEFAULT_URL
        return url.rstrip("/").removesuffix("/v1")

    def get(self, path: str) -> Any:
        """Send a GET request for `path`, and return the parsed JSON of the response.

        Raises:
            Unreachable: the gateway did not respond, or its response is not JSON.
            Refused: the gateway responded with an error.
        """
        return self._ask("GET", path, TIMEOUT_SECS)

    def post(self, path: str, timeout_secs: float = TIMEOUT_SECS) -> Any:
        """Send a POST request without a body to `path`, and return the parsed JSON of the response.

        Raises:
            Unreachable: the gateway did not respond within `timeout_secs` seconds, or its response is not JSON.
            Refused: the gateway responded with an error.
        """
        return self._ask("POST", path, timeout_secs)

    def _ask(self, method: str, path: str, timeout_secs: float) -> Any:
        import json
        from http.client import HTTPException
        from urllib import request
        from urllib.error import HTTPError

        url = self.endpoint + path
        # No proxies, as for requests to nodes. No redirects, because a redirect could leak the key.
        direct = request.OpenerDirector()
        for handler in (
            request.HTTPHandler(),
            request.HTTPSHandler(),
            request.HTTPErrorProcessor(),
            request.HTTPDefaultErrorHandler(),
            request.UnknownHandler(),
        ):
            direct.add_handler(handler)
        try:
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            with direct.open(request.Request(url, method=method, headers=headers), timeout=timeout_secs) as response:
                return json.load(response)
        except HTTPError as error:
            with error:
                raise Refused(f"{url}: {_error_message(error)}") from None
        except (OSError, ValueError, HTTPException) as error:
            reason = " ".join(str(getattr(error, "reason", error)).split())
            raise Unreachable(f"{url} did not respond: {reason}") from None


def _error_message(error: Any) -> str:
    """Return the message of the gateway's error response, or its HTTP status and reason if the body has no message."""
    import json

    try:
        return printable(json.loads(error.read(1 << 16))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {printable(error.reason)}"
