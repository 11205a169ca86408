"""Handle of a running fetch, and the errors of a fetch.

A fetch finds or downloads a model in a worker thread.
"""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

from helexa.core.errors import SourceError

# Function that receives stage, bytes done and total bytes (0: unknown).
ProgressReport = Callable[[str, int, int], None]

_FULL_ERRORS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "has no quota left",
    errno.EFBIG: "does not allow files of this size",
}
_FREE_SPACE = "free some space, or configure another cache folder"
_DENIED_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


class FetchAbandoned(BaseException):
    """Raised in the worker thread of a canceled fetch, to end its work."""


class Fetch:
    """Handle of a running fetch, which finds or downloads a model in a worker thread."""

    def __init__(self, report: ProgressReport) -> None:
        self._report = report
        self._abandoned = threading.Event()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report progress. Raise `FetchAbandoned` if the fetch is canceled.

        Args:
            stage: name of the current stage, such as `download`.
            total: total number of bytes, or 0 if unknown.
        """
        self.check()
        self._report(stage, done, total)

    def check(self) -> None:
        """Raise `FetchAbandoned` if the fetch is canceled."""
        if self._abandoned.is_set():
            raise FetchAbandoned

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`. Raise `FetchAbandoned` as soon as the fetch is canceled."""
        if self._abandoned.wait(seconds):
            raise FetchAbandoned

    def abandon(self) -> None:
        """Cancel the fetch; its thread ends at its next call of this object."""
        self._abandoned.set()


class WebError(Exception):
    """A fetch failed: an HTTP request failed, or its response is unusable.

    The text `reason` names the server.
    """

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


class DiskError(Exception):
    """A fetch failed: the disk is too full for the model, or cannot be written."""

    def __init__(self, reason: str, kind: str = "cache_failed", **details: int | str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.details = details  # further fields of the `SourceError`, such as the required bytes


class ContentError(Exception):
    """A fetch failed: an unusable file, for example with a wrong checksum."""


def disk_full_error(folder: Path, required: int, free: int) -> DiskError:
    """Return the error of a fetch that needs `required` bytes if only `free` are free."""
    return DiskError(
        f"the download needs {_size(required)}, but {_size(free)} are free in {folder}; {_FREE_SPACE}",
        kind="disk_full",
        required_bytes=required,
        free_bytes=free,
        path=str(folder),
    )


def disk_error(error: OSError, folder: Path) -> DiskError:
    """Return the `DiskError` for `error`, raised by a write to `folder`."""
    if error.errno in _FULL_ERRORS:
        reason = f"the disk with {folder} {_FULL_ERRORS[error.errno]}; {_FREE_SPACE}"
        return DiskError(reason, kind="disk_full", path=str(folder))
    if error.errno in _DENIED_ERRORS:
        reason = f"the folder {folder} cannot be written ({error.strerror})"
        hint = "make the folder writable, or configure another cache folder"
        return DiskError(f"{reason}; {hint}", kind="cache_unwritable", path=str(folder))
    cause = error.strerror or type(error).__name__
    return DiskError(f"{folder} cannot be read or written: {cause}; check the disk", path=str(folder))


def source_error(
    error: WebError | DiskError | ContentError,
    source: str,
    *,
    token: str = "",
    has_token: bool = False,
    missing: str = "",
) -> SourceError:
    """Return the `SourceError` for a model whose download failed with `error`.

    Args:
        token: name of the environment variable or setting that contains the access token, for the error message.
        has_token: whether the failed request contained a token.
        missing: description of the files that the cache lacks, if the cache has other files of the model.
    """
    name = source.partition(":")[2]
    if isinstance(error, DiskError):
        reason = f"the model cannot be cached: {error}"
        return SourceError(f"{source}: {reason}", kind=error.kind, model_id=name, cause=reason, **error.details)
    if isinstance(error, ContentError):
        reason = f"the model cannot be used: {error}"
        return SourceError(f"{source}: {reason}", kind="invalid_source", model_id=name, cause=reason)
    reason = _web_reason(error, token, has_token)
    if missing and error.transient:
        reason += f"; {missing}"
    elif error.transient and error.status != 429:  # the reason for status 429 says when to try again
        reason += "; try again later"
    kind = "repo_fetch_failed" if error.transient else "repo_refused"
    return SourceError(f"{source}: {reason}", kind=kind, model_id=name, cause=reason)


def _web_reason(error: WebError, token: str, has_token: bool) -> str:
    where, status = error.where, error.status
    if error.code == "GatedRepo":
        return (
            f"the model is gated at {where} (HTTP {status}); accept the model's terms there, then set {token} to a "
            "token that may read the model"
        )
    if status in (401, 403) and has_token:
        reason = f"access to the model is refused by {where} (HTTP {status})"
        return f"{reason}; check the name, and whether the token in {token} may read the model"
    if status in (401, 403):
        reason = f"the model is private or does not exist at {where} (HTTP {status})"
        return f"{reason}; check the name, or set {token} to a token that may read the model"
    if status == 404:
        return f"the model does not exist at {where} (HTTP 404); check the name"
    if status == 429:
        when = "later" if error.retry_after is None else f"in {error.retry_after} s"
        return f"the model could not be fetched from {where}, which limits requests (HTTP 429); try again {when}"
    return f"the model could not be fetched: {error}"


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
