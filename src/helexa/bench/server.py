"""Runs the web server for the pages and the API."""

import logging
from pathlib import Path

from helexa.bench.app import create_app
from helexa.core.address import Address
from helexa.http.listener import Listener, bind, stop_on_signals

log = logging.getLogger(__name__)


async def serve(database: Path, listen: Address, root_path: str = "", console_url: str | None = None) -> None:
    """Serve the pages and the API until SIGINT or SIGTERM.

    Args:
        database: path of the database.
        listen: address to listen on.
        root_path: path prefix set by a reverse proxy.
        console_url: URL of a gateway's console, which the pages link to, or None.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    with bind(listen) as bound:
        listener = Listener(create_app(database, root_path, console_url))
        stop_on_signals(listener)
        log.info("listening on http://%s", Address(*bound.getsockname()[:2]))
        await listener.serve(bound)
