"""Commands `cortex status`, `explain`, `cordon`, `uncordon`, `drain` and `top`.

The commands send requests to the API of a running gateway.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from helexa.core.display import printable, text_table
from helexa.core.errors import HelexaError

TIMEOUT_SECS = 10.0

_DEFAULT_URL = "http://127.0.0.1:31313"

_DRAIN_TIMEOUT_SECS = 900.0
_HEADINGS = ("ENDED", "KEY", "MODEL", "NODE", "STATUS", "PROMPT", "CACHED", "OUTPUT", "TTFT", "SECONDS", "TOK/S")
_REFRESH_SECS = 1.0
_ID_COLUMNS = 40


class Unreachable(HelexaError):
    """The gateway did not respond to a command, or its response is not HTTP or JSON."""

    exit_code = 3


class Refused(HelexaError):
    """The gateway responded to a command (`cordon`, `top`, ...) with an error.

    The exception's message contains the message of the error response.
    """


@Parameter(name="*")
@dataclass(frozen=True)
class GatewayApi:
    """Client for the API of a running gateway.

    Attributes:
        url: base URL of the gateway, with or without /v1. The default is HELEXA_BASE_URL, or else
            http://127.0.0.1:31313.
        former_url: value of `--endpoint`, the former name of the option `--url`.
        key: API key, if the gateway requires one. Prefer the variable HELEXA_API_KEY, because other users of the host
            can see the options of a command.
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
        """Send a POST request without a body, and return the parsed JSON of the response.

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
        # The opener has no handler for proxies, because the gateway's requests to nodes use no proxy either. It has no
        # handler for redirects, because a redirect could send the key to another server.
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
                hint = f"; {'check' if self.key else 'set'} HELEXA_API_KEY" if error.code == 401 else ""
                raise Refused(f"{url}: {_error_message(error)}{hint}") from None
        except (OSError, ValueError, HTTPException) as error:
            cause = getattr(error, "reason", error)
            reason = " ".join(str(getattr(cause, "strerror", None) or cause).split())
            raise Unreachable(f"{url} did not respond: {reason}; start the gateway, or check --url") from None


def _error_message(error: Any) -> str:
    """Return the message of an error response, or its status and reason."""
    import json

    try:
        return printable(json.loads(error.read(1 << 16))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {printable(error.reason)}"


_DEFAULT_API = GatewayApi()


def status(
    *, api: GatewayApi = _DEFAULT_API, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
) -> None:
    """Show a running gateway's health and where its models are loaded.

    Args:
        as_json: print JSON for programs.
    """
    health, models = api.get("/health"), api.get("/v1/models")
    try:
        lines = [_model_line(model) for model in models["data"]]
    except (KeyError, TypeError):
        raise HelexaError(f"{api.endpoint} is not a helexa gateway: unexpected response; check --url") from None
    if as_json:
        print(json.dumps({"health": health, "models": models["data"]}, indent=2))
    else:
        print(json.dumps(health, indent=2), *lines, sep="\n")


def _model_line(model: dict[str, Any]) -> str:
    locations = ", ".join(f"{location['node']}({location['status']})" for location in model["locations"])
    return f"{model['id']:<{_ID_COLUMNS}} {locations}".rstrip()


def explain(
    model: str,
    /,
    *,
    api: GatewayApi = _DEFAULT_API,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show where a request for a model would be sent, and why.

    Args:
        model: id of the model, or an alias.
        as_json: print JSON for programs.
    """
    content = api.get(f"/api/explain?model={quote(model, safe='')}")
    if as_json:
        print(json.dumps(content, indent=2))
        return
    try:
        print("\n".join(_explanation_lines(content)))
    except (KeyError, TypeError, AttributeError):
        raise HelexaError(f"{api.endpoint} is not a helexa gateway: unexpected response; check --url") from None


def cordon(node: str, /, *, api: GatewayApi = _DEFAULT_API) -> None:
    """Send no new requests and loads to a node. Running requests and loads continue.

    Args:
        node: name of the node.
    """
    _post(api, node, "cordon")
    print(f"{printable(node)} is cordoned: it gets no new requests or loads until `cortex uncordon {printable(node)}`")


def uncordon(node: str, /, *, api: GatewayApi = _DEFAULT_API) -> None:
    """Send requests and loads to a node again.

    Args:
        node: name of the node.
    """
    _post(api, node, "uncordon")
    print(f"{printable(node)} is uncordoned: it gets requests and loads again")


def drain(node: str, /, *, api: GatewayApi = _DEFAULT_API) -> None:
    """Cordon a node and wait for the end of its requests and loads.

    Args:
        node: name of the node.
    """
    content = _post(api, node, "drain", _DRAIN_TIMEOUT_SECS)
    in_flight, loading = content.get("in_flight"), content.get("loading")
    if in_flight or loading:
        raise HelexaError(
            f"{node} is cordoned, but {in_flight} requests and {loading} loads are still running; "
            "run the command again to wait longer"
        )
    print(f"{printable(node)} is drained: it gets no new requests or loads until `cortex uncordon {printable(node)}`")


def _post(api: GatewayApi, node: str, verb: str, timeout_secs: float = 10.0) -> dict[str, Any]:
    content = api.post(f"/api/nodes/{quote(node, safe='')}/{verb}", timeout_secs)
    return content if isinstance(content, dict) else {}


def _explanation_lines(content: dict[str, Any]) -> list[str]:
    placement = f"{content['decision']} on {content['node']}" if content["node"] else content["decision"]
    lines = [f"{printable(content['model'])}: {printable(placement)}", f"  {printable(content['reason'])}"]
    if content["evict"]:
        lines.append(f"  unloads {', '.join(printable(model) for model in content['evict'])}")
    candidates = content["candidates"]
    return lines + [f"  - {printable(node['node'])}: {printable(node['verdict'])}" for node in candidates]


def top(
    *,
    api: GatewayApi = _DEFAULT_API,
    once: Annotated[bool, Parameter(negative="")] = False,
    limit: Annotated[int, Parameter(name=["--limit", "-n"])] = 30,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show the newest requests, refreshed every second until Ctrl-C.

    Args:
        once: print the requests once and exit.
        limit: number of requests.
        as_json: print the requests once, as JSON for programs.
    """
    if as_json:
        print(json.dumps(api.get(f"/api/activity?limit={limit}"), indent=2))
        return
    first_table = _table(api, limit)
    if once:
        print(first_table)
        return
    from rich.live import Live
    from rich.text import Text

    with suppress(KeyboardInterrupt), Live(Text(first_table, no_wrap=True), auto_refresh=False, screen=True) as live:
        for table in _tables(api, limit, first_table):
            live.update(Text(table, no_wrap=True, overflow="ellipsis"), refresh=True)


def _tables(api: GatewayApi, limit: int, table: str) -> Iterator[str]:
    """Yield a new table every second.

    If the gateway does not respond, yield the error above the previous table.
    """
    while True:
        time.sleep(_REFRESH_SECS)
        try:
            table = _table(api, limit)
        except HelexaError as error:
            yield f"{error}\n\n{table}"
        else:
            yield table


def _table(api: GatewayApi, limit: int) -> str:
    content = api.get(f"/api/activity?limit={limit}")
    try:
        return text_table(_HEADINGS, [_row(entry) for entry in content["requests"]])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise HelexaError(f"{api.endpoint} is not a helexa gateway: unexpected response; check --url") from None


def _row(entry: dict[str, Any]) -> tuple[object, ...]:
    end_time = time.localtime((entry["started_ms"] + entry["duration_ms"]) / 1000)
    status = f"{entry['status']} {entry.get('error_code') or ('left' if entry.get('client_gone') else '')}"
    ttft = entry.get("ttft_ms")
    return (
        time.strftime("%H:%M:%S", end_time),
        entry.get("key_id"),
        entry.get("alias") or entry["model"],
        entry.get("node"),
        status,
        entry.get("prompt"),
        entry.get("cached"),
        entry.get("completion"),
        None if ttft is None else f"{ttft / 1000:.2f}",
        f"{entry['duration_ms'] / 1000:.2f}",
        entry.get("tokens_per_second"),
    )
