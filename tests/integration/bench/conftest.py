"""Fixtures: benchmark databases with a history, and an HTTP server of the pages and the API for them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import fleet_history
from helexa.bench.app import create_app
from helexa.bench.results.archive import Archive
from helexa.http.listener import Listener, bind


@contextmanager
def _serving(database: Path, root_path: str = "") -> Iterator[str]:
    """Serve the pages and the API of a database; yield their base URL."""
    bound = bind(("127.0.0.1", 0))
    host, port = bound.getsockname()[:2]
    listener = Listener(create_app(database, root_path))
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_until_complete(listener.serve(bound))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://{host}:{port}"
    finally:
        loop.call_soon_threadsafe(setattr, listener, "should_exit", True)
        thread.join()


@pytest.fixture(scope="session")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of about 5,000 runs, two alerts and some scores."""
    path = tmp_path_factory.mktemp("past") / "bench.sqlite"
    fleet_history.write(path, 5_000)
    fleet_history.add_alert(path)
    return path


@pytest.fixture
def archive(past: Path) -> Iterator[Archive]:
    with Archive(past) as opened:
        yield opened


@pytest.fixture(scope="session")
def site(past: Path) -> Iterator[str]:
    with _serving(past) as url:
        yield url


@pytest.fixture(scope="session")
def serving():
    """A context manager that serves the database at a given path."""
    return _serving
