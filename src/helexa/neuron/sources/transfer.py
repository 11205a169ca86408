"""Download one file into the cache. An interrupted download is resumed, and the checksum is verified at the end."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from helexa.neuron.sources.fetch import Fetch
from helexa.neuron.sources.fetch_errors import ContentError, disk_error
from helexa.neuron.sources.listing import RemoteFile
from helexa.neuron.sources.web import Site, SiteResponse, WebError

_MAX_ATTEMPTS = 5
_MAX_DELAY_SECONDS = 60
_PROGRESS_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_MAX_RANGE_BYTES = 32 << 30  # the content networks of hubs serve much larger files only in parts
_LOCK_SECONDS = 0.2


def retry_delay(failures: int, error: WebError) -> int | None:
    """Return the number of seconds to wait before the next attempt of a request. Return None to give up.

    Args:
        failures: number of failed attempts in a row.
        error: error of the last attempt.
    """
    if not error.transient or failures >= _MAX_ATTEMPTS:
        return None
    if error.retry_after is not None:
        return max(1, error.retry_after) if error.retry_after <= _MAX_DELAY_SECONDS else None
    return 2 ** (failures - 1)


@contextmanager
def locked_file(path: Path, is_complete: Callable[[], bool], fetch: Fetch) -> Iterator[FileIO | None]:
    """Open the file at `path` for reading and appending, lock it against other processes, and yield it.

    While another process holds the lock and downloads the file, report the file's size to `fetch`. If the other process
    has completed the file, `is_complete()` returns True, and the function yields None.

    Args:
        path: path of the partially downloaded file.
        is_complete: function that returns whether the complete file exists.
        fetch: handle to report progress and to check for cancellation.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while not is_complete():
        with path.open("a+b", buffering=0) as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    fetch.progress("wait", os.fstat(file.fileno()).st_size, 0)
                    fetch.wait(_LOCK_SECONDS)
            if not _is_at(file, path):
                continue  # the previous owner renamed or deleted the file
            if is_complete():
                path.unlink()
                break
            yield file
            return
    yield None


def rename_locked(file: FileIO, path: Path, name: Path) -> None:
    """Rename the file at `path` to `name`. `file` is the file that the caller has locked.

    Raises:
        OSError: the file at `path` is not the locked file, because it was removed or replaced.
    """
    if not _is_at(file, path):
        raise FileNotFoundError(errno.ENOENT, "a file was removed during its download")
    path.replace(name)


class Transfer:
    """Downloads a file of a repository into the open file `target`.

    Args:
        site: server of the file.
        path: path of the file at the site.
        file: expected size and checksum.
        target: locked file in the cache. It may contain the first bytes of the content, from an earlier download.
        folder: cache folder, for error messages.
        advance: function that receives the number of downloaded bytes after each chunk. It may raise an error to end
            the transfer.
    """

    def __init__(
        self, site: Site, path: str, file: RemoteFile, target: FileIO, folder: Path, advance: Callable[[int], None]
    ) -> None:
        self._site = site
        self._path = path
        self._file = file
        self._target = target
        self._folder = folder
        self._advance = advance
        self._done = 0
        self._max_done = 0
        self._complete = False
        self._sum = file.checksum()

    def run(self, wait: Callable[[float], None]) -> None:
        """Download the missing bytes and verify the checksum.

        If the download fails, the received bytes stay in the target file, so that a later transfer can resume the
        download. If the checksum is wrong, the received bytes are discarded.

        Args:
            wait: function that sleeps for a number of seconds before a retry.

        Raises:
            WebError: the site returned a permanent error, or too many attempts in a row failed.
            ContentError: the size or checksum of the received file differs from the listing.
            DiskError: the target cannot be written.
        """
        self._resume()
        resumed = self._done > 0
        while True:
            self._receive_all(wait)
            if self._sum is None or self._file.is_sum(self._sum.hexdigest()):
                break
            digest = self._sum.hexdigest()
            self._restart()
            if not resumed:
                raise ContentError(
                    f"cannot be used: {self._file.name} has checksum {digest}, "
                    f"but {self._file.sha256 or self._file.git_id} was announced; the received bytes were discarded"
                )
            resumed = False
        try:
            os.fsync(self._target.fileno())
        except OSError as error:
            raise disk_error(error, self._folder) from error

    def _resume(self) -> None:
        """Add the bytes of an interrupted download in the target to the checksum. The download continues after them.

        Discard the bytes if the target is larger than the file, or if the size of the file is unknown.
        """
        size = os.fstat(self._target.fileno()).st_size
        if self._file.size is None or size > self._file.size:
            self._done = size
            self._restart()
            return
        self._target.seek(0)
        while self._done < size:
            self._count(self._target.read(min(_CHUNK_BYTES, size - self._done)))

    def _receive_all(self, wait: Callable[[float], None]) -> None:
        failures = 0
        self._complete = self._file.size == self._done
        while not self._complete:
            try:
                self._receive()
            except WebError as error:
                if self._done >= self._max_done + _PROGRESS_BYTES:
                    failures = 0
                self._max_done = max(self._max_done, self._done)
                failures += 1
                seconds = retry_delay(failures, error)
                if seconds is None:
                    raise
                wait(seconds)

    def _receive(self) -> None:
        remaining = 0 if self._file.size is None else self._file.size - self._done
        stop = self._done + _MAX_RANGE_BYTES if remaining > _MAX_RANGE_BYTES else None
        try:
            response = self._site.get(self._path, self._done, stop)
        except WebError as error:
            if error.status == 416 and self._done:  # the file at the site is shorter than the partial file
                self._restart()
                error.transient = True
            raise
        with response:
            size = self._expected(response)
            start = self._done
            for chunk in response.chunks():
                if size is not None and self._done + len(chunk) > size:
                    self._restart()
                    raise ContentError(
                        f"cannot be used: {response.where} sends more of {self._file.name} than announced"
                    )
                try:
                    _write(self._target, chunk)
                except OSError as error:
                    raise disk_error(error, self._folder) from error
                self._count(chunk)
        self._complete = size in (None, self._done)
        if not self._complete and (response.length is None or self._done == start):
            raise WebError(response.where, f"hung up after {self._done} of {size} bytes")

    def _expected(self, response: SiteResponse) -> int | None:
        """Return the length of the complete file, or None if it is unknown.

        The response should begin after the bytes received so far. If the response begins at another position or
        contains the whole file, the method discards the bytes received so far.

        Raises:
            WebError: the response contains another range of the file than requested.
            ContentError: the length differs from the length in the listing.
        """
        content_range = response.content_range
        if content_range is None:
            self._restart()
            length = response.length
        else:
            begin, _, total = content_range.removeprefix("bytes ").partition("/")
            if begin.partition("-")[0] != str(self._done):
                self._restart()
                raise WebError(response.where, f"sent another range of {self._file.name} than requested")
            length = int(total) if total.isdecimal() else None
        size = self._file.size
        if size is not None and length is not None and length != size:
            raise ContentError(
                f"cannot be used: {self._file.name} has {length} bytes at {response.where}, but {size} were announced"
            )
        return length if size is None else size

    def _count(self, chunk: bytes) -> None:
        self._done += len(chunk)
        if self._sum is not None:
            self._sum.update(chunk)
        self._advance(self._done)

    def _restart(self) -> None:
        if self._done:
            self._target.truncate(0)
            self._done = 0
            self._sum = self._file.checksum()


def _write(target: FileIO, chunk: bytes) -> None:
    remaining = memoryview(chunk)
    while remaining:
        remaining = remaining[target.write(remaining) :]


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
