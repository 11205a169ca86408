"""Commands for a running fleet: explain routing; cordon, uncordon and drain nodes."""

import json
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from helexa.core.errors import HelexaError
from helexa.core.text_table import printable
from helexa.cortex.commands.api_client import GatewayApi

_DRAIN_TIMEOUT_SECS = 900.0
_DEFAULT_API = GatewayApi()


def explain(
    model: str,
    /,
    *,
    api: GatewayApi = _DEFAULT_API,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show where a request for a model would be sent now, why, and which models would be unloaded first.

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
        raise HelexaError(f"{api.endpoint} is not a helexa gateway: unexpected response") from None


def cordon(node: str, /, *, api: GatewayApi = _DEFAULT_API) -> None:
    """Send no new requests and loads to a node. Running requests continue.

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
    """Cordon a node and wait until its requests and loads have ended.

    Args:
        node: name of the node.
    """
    content = _post(api, node, "drain", _DRAIN_TIMEOUT_SECS)
    in_flight, loading = content.get("in_flight"), content.get("loading")
    if in_flight or loading:
        raise HelexaError(
            f"{node} is cordoned, but {in_flight} requests and {loading} loads are still running; run the command again"
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
