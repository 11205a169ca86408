"""What is not kept for ever: single requests and readings. Runs, with the percentiles of their requests, are."""

from helexa.bench.store.store import Store, now_ms

_DAY_MS = 86_400_000


def prune(store: Store, days: int) -> int:
    """Delete requests and readings of runs that began more than so many days ago; how many requests that were."""
    old = "run_id IN (SELECT id FROM run WHERE started_ms < ?)"
    before = (now_ms() - days * _DAY_MS,)
    with store.transaction() as connection:
        connection.execute(f"DELETE FROM telemetry WHERE {old}", before)
        return connection.execute(f"DELETE FROM request WHERE {old}", before).rowcount
