"""Fixtures that run each ledger test on SQLite and on PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.postgres import Postgres, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'state' / 'cortex.db'}"
    return request.getfixturevalue("postgres").new_database()
