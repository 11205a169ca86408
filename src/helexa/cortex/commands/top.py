"""`cortex top`: shows the newest finished requests of a gateway."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

from cyclopts import Parameter

from helexa.core.errors import HelexaError
from helexa.core.text_table import text_table
from helexa.cortex.commands.api_client import GatewayApi

_HEADINGS = ("ENDED", "KEY", "MODEL", "NODE", "STATUS", "PROMPT", "CACHED", "OUTPUT", "TTFT", "SECONDS", "TOK/S")
_REFRESH_SECS = 1.0
_DEFAULT_API = GatewayApi()


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
    """Yield a new table every second. If the gateway does not respond, yield the error above the last table."""
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
        raise HelexaError(f"{api.endpoint} is not a helexa gateway: unexpected response") from None


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
