"""The loads of this gateway as clients see them: progress of running loads, and reasons of failed loads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.lifecycle.load_job import Progress


@dataclass(frozen=True)
class LoadFailure:
    """The last failed load of a model on a node.

    Attributes:
        message: the reason.
        temporary: True if the same load may succeed later.
        times: number of consecutive failures.
        retry_at: from this time on, requests for the model start the load again (Unix seconds).
    """

    message: str
    temporary: bool
    times: int
    retry_at: int

    def json_dict(self) -> dict[str, Any]:
        """Return the failure as a JSON object."""
        return {
            "message": self.message,
            "temporary": self.temporary,
            "times": self.times,
            "retry_at": self.retry_at,
        }


@dataclass(frozen=True)
class LoadReport:
    """Running, waiting and failed loads by (node, model)."""

    loads: Mapping[Pair, Progress] = field(default_factory=dict[Pair, Progress])
    failures: Mapping[Pair, LoadFailure] = field(default_factory=dict[Pair, LoadFailure])
