"""Runs the event loop of a server: uvloop if it is installed, else asyncio's default."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine `work` in a new event loop until it returns."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)
