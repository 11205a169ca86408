"""Deletes old data on single requests and old accelerator readings.

Samples and their percentiles are not deleted.
"""

from helexa.bench.store.store import Store, now_ms

_DAY_MS = 86_400_000


def prune(store: Store, days: int) -> int:
    """Delete requests and accelerator readings of samples that are older than `days` days.

    Returns:
        The number of deleted requests.
    """
    old = "run_id IN (SELECT id FROM run WHERE started_ms < ?)"
    before = (now_ms() - days * _DAY_MS,)
    with store.transaction() as connection:
        connection.execute(f"DELETE FROM telemetry WHERE {old}", before)
        return connection.execute(f"DELETE FROM request WHERE {old}", before).rowcount
