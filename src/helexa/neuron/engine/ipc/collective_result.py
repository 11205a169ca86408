"""The message in which `collective_check` reports the result of one exchange between ranks."""

import msgspec


class CollectiveResult(msgspec.Struct, frozen=True):
    """The result of one exchange between ranks.

    Attributes:
        operation: `gather` or `sum`.
        transport: how the ranks exchange data: `shared memory` or `gloo`.
        size: size of the result in bytes.
        verified: whether the result has the expected values.
        median_us: median duration in microseconds; None if the exchange was not timed.
    """

    operation: str
    transport: str
    size: int
    verified: bool
    median_us: float | None
