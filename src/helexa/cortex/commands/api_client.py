"""A running gateway, asked from the command line."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Parameter

from helexa.core.errors import HelexaError
from helexa.core.text_table import printable

PATIENCE_SECS = 10.0


class Unreachable(HelexaError):
    """Nobody answers there, or nobody who speaks HTTP and JSON."""

    exit_code = 3


class Refused(HelexaError):
    """The gateway said no, and why."""


@Parameter(name="*")
@dataclass(frozen=True)
class GatewayApi:
    """The gateway to ask.

    Attributes:
        endpoint: base URL of the gateway.
        key: API key, where the gateway wants one; better given in HELEXA_API_KEY, which other users cannot see.
    """

    endpoint: Annotated[str, Parameter(name=["--endpoint", "-e"])] = "http://localhost:31313"
    key: Annotated[str | None, Parameter(env_var="HELEXA_API_KEY")] = field(default=None, repr=False)

    def get(self, path: str) -> Any:
        """The JSON at `path`.

        Raises:
            Unreachable, Refused: there is none.
        """
        return self._ask("GET", path, PATIENCE_SECS)

    def post(self, path: str, patience: float = PATIENCE_SECS) -> Any:
        """The same by POST, with nothing said; the answer may take `patience` seconds."""
        return self._ask("POST", path, patience)

    def _ask(self, method: str, path: str, patience: float) -> Any:
        import json
        from http.client import HTTPException
        from urllib import request
        from urllib.error import HTTPError

        url = self.endpoint.rstrip("/") + path
        # Past any proxy, as nodes are asked; and no redirect is followed, least of all with a key.
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
            with direct.open(request.Request(url, method=method, headers=headers), timeout=patience) as response:
                return json.load(response)
        except HTTPError as error:
            with error:
                raise Refused(f"{url}: {_words(error)}") from None
        except (OSError, ValueError, HTTPException) as error:
            reason = " ".join(str(getattr(error, "reason", error)).split())
            raise Unreachable(f"{url} gave no answer: {reason}") from None


def _words(error: Any) -> str:
    """What a refusal says, whoever speaks."""
    import json

    try:
        return printable(json.loads(error.read(1 << 16))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {printable(error.reason)}"
