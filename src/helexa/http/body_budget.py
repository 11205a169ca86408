"""Limits the memory that a server uses for request bodies."""

from helexa.core.errors import overloaded

DEFAULT_BYTES = 512 << 20

_RETRY_SECS = 2


class BodyBudget:
    """Memory limit for the request bodies of all connections of a server.

    One client address may use at most half of the memory, so one client cannot block all others.

    Attributes:
        total: the limit in bytes. It may be changed at any time.
        reserved: number of bytes that are reserved at present.
    """

    def __init__(self, total: int = DEFAULT_BYTES) -> None:
        self.total = total
        self.reserved = 0
        self._by_address: dict[str, int] = {}

    def reserve(self, address: str, size: int) -> None:
        """Reserve `size` bytes for a request body from the client address `address`.

        Raises:
            ApiError: status 503, if the limit would be exceeded.
        """
        address_bytes = self._by_address.get(address, 0) + size
        if self.reserved + size > self.total or address_bytes > self.total // 2:
            raise overloaded("the memory for request bodies is used up; try again", _RETRY_SECS)
        self.reserved += size
        self._by_address[address] = address_bytes

    def release(self, address: str, size: int) -> None:
        """Release `size` bytes that were reserved for the client address `address`."""
        self.reserved -= size
        remaining_bytes = self._by_address[address] - size
        if remaining_bytes:
            self._by_address[address] = remaining_bytes
        else:
            del self._by_address[address]
