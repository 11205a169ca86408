"""Limit the memory that a server uses for request bodies."""

from helexa.core.errors import overloaded

DEFAULT_BYTES = 512 << 20

_RETRY_SECS = 2


class BodyBudget:
    """Memory budget of request bodies over all connections of a server.

    One client address may hold at most half of the budget, so that no client can use up all of it.

    Attributes:
        total: the budget in bytes; may be changed at any time.
        reserved: bytes that are reserved now.
    """

    def __init__(self, total: int = DEFAULT_BYTES) -> None:
        self.total = total
        self.reserved = 0
        self._by_address: dict[str, int] = {}

    def reserve(self, address: str, size: int) -> None:
        """Reserve `size` bytes for a body from `address`.

        Raises:
            ApiError: 503: the bytes are not available.
        """
        address_bytes = self._by_address.get(address, 0) + size
        if self.reserved + size > self.total or address_bytes > self.total // 2:
            raise overloaded("the memory for request bodies is used up; try again", _RETRY_SECS)
        self.reserved += size
        self._by_address[address] = address_bytes

    def release(self, address: str, size: int) -> None:
        """Return `size` bytes that were reserved for `address`."""
        self.reserved -= size
        remaining_bytes = self._by_address[address] - size
        if remaining_bytes:
            self._by_address[address] = remaining_bytes
        else:
            del self._by_address[address]
