"""The error of an HTTP request, without the HTTP client, which is slow to import."""


class WebError(Exception):
    """A failed HTTP request or an unusable response."""

    def __init__(
        self,
        where: str,
        reason: str,
        *,
        status: int | None = None,
        code: str = "",
        retry_after: int | None = None,
        transient: bool = True,
    ) -> None:
        super().__init__(reason)
        self.where = where  # scheme, host and port of the server
        self.status = status  # HTTP status, or None if there was no response
        # Error code of the Hugging Face Hub, such as `GatedRepo`. Empty if the response has no error code.
        self.code = code
        self.retry_after = retry_after  # value of `Retry-After` in seconds, or None
        self.transient = transient  # whether the error may be transient. In this case, a retry may succeed.
