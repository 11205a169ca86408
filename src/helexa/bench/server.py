"""Serves the pages and the API until it is told to stop."""

import asyncio
import logging
import signal
from contextlib import suppress
from pathlib import Path

from helexa.bench.app import create_app
from helexa.core.address import Address
from helexa.http.listener import Listener, bind

log = logging.getLogger(__name__)


async def serve(database: Path, listen: Address, root_path: str = "") -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        HelexaError: the address cannot be listened on.
    """
    with bind(listen) as bound:
        listener = Listener(create_app(database, root_path))

        def stop() -> None:
            listener.should_exit = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):  # not every system's loop can
                loop.add_signal_handler(number, stop)
        log.info("listening on http://%s", Address(*bound.getsockname()[:2]))
        await listener.serve(bound)
