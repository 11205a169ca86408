"""Download a model's files into the cache: resumed, verified, concurrent."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from helexa.neuron.processes.file_locks_and_threads import try_lock
from helexa.neuron.sources.fetch_and_errors import ContentError, Fetch, WebError, disk_error, disk_full_error
from helexa.neuron.sources.repository_files import Listing, RemoteFile
from helexa.neuron.sources.snapshot import Snapshots

if TYPE_CHECKING:  # a cached model needs no HTTP client
    from helexa.neuron.sources.hub_http_client import Site, SiteResponse

_MAX_ATTEMPTS = 5
_MAX_DELAY_SECONDS = 60
_PROGRESS_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_MAX_RANGE_BYTES = 32 << 30  # maximum size of one HTTP range; the CDNs of hubs serve much larger files only in parts
_LOCK_SECONDS = 0.2

_POLL_SECONDS = 0.1
_MAX_REPORTS = 1000
_MIN_STEP_BYTES = 1 << 18


def retry_delay(failures: int, error: WebError) -> int | None:
    """Return the seconds to wait after `failures` failed attempts; None to give up."""
    if not error.transient or failures >= _MAX_ATTEMPTS:
        return None
    if error.retry_after is not None:
        return max(1, error.retry_after) if error.retry_after <= _MAX_DELAY_SECONDS else None
    return 2 ** (failures - 1)


@contextmanager
def locked_file(path: Path, is_complete: Callable[[], bool], fetch: Fetch) -> Iterator[FileIO | None]:
    """Open and lock the file of a download at `path`, to read and append.

    While another process holds the lock and downloads the file, report the file's size to `fetch`. If `is_complete()`
    is True at first, or after another process has completed the file, the function yields None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while not is_complete():
        with path.open("a+b", buffering=0) as file:
            while not try_lock(file.fileno()):
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


def _rename_locked(file: FileIO, path: Path, name: Path) -> None:
    """Rename the file at `path`, which is the locked `file`, to `name`.

    Raises:
        OSError: the file at `path` is not the locked file, because it was removed or replaced.
    """
    if not _is_at(file, path):
        raise FileNotFoundError(errno.ENOENT, f"the file {path.name} was removed or replaced during its download")
    path.replace(name)


class Transfer:
    """Downloads a file of a repository into the open file `target`."""

    def __init__(
        self, site: "Site", path: str, file: RemoteFile, target: FileIO, folder: Path, advance: Callable[[int], None]
    ) -> None:
        self._site = site
        self._path = path
        self._file = file
        # Locked file in the cache. It may contain the first bytes of the content, from an earlier download.
        self._target = target
        self._folder = folder
        # Function that receives the number of downloaded bytes after each chunk. It may raise an error to end the
        # transfer.
        self._advance = advance
        self._done = 0
        self._max_done = 0
        self._complete = False
        self._sum = file.checksum()

    def run(self, wait: Callable[[float], None]) -> None:
        """Download the missing bytes and verify the checksum.

        If the download fails, the received bytes stay in the target file, so that a later transfer can resume the
        download. If the checksum is wrong, the received bytes are discarded, and a resumed file is downloaded once more
        as a whole.

        Args:
            wait: function that sleeps for a number of seconds before a retry. It may raise an error to end the
                transfer.

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
                    f"the file {self._file.name} has checksum {digest}, "
                    f"but {self._file.sha256 or self._file.git_id} was announced; "
                    "the received bytes were discarded; try again, or check the endpoint"
                )
            # The bytes of the interrupted download may be wrong, so the whole file is downloaded once more.
            resumed = False
        try:
            os.fsync(self._target.fileno())
        except OSError as error:
            raise disk_error(error, self._folder) from error

    def _resume(self) -> None:
        """Resume an interrupted download: add the bytes on the disk to the checksum."""
        size = os.fstat(self._target.fileno()).st_size
        # If the file has no known size, or is smaller than the partial download, the received bytes cannot be
        # trusted.
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
                        f"{response.where} sends more bytes of the file {self._file.name} than it announced; "
                        "check the endpoint"
                    )
                try:
                    _write(self._target, chunk)
                except OSError as error:
                    raise disk_error(error, self._folder) from error
                self._count(chunk)
        self._complete = size in (None, self._done)
        if not self._complete and (response.length is None or self._done == start):
            raise WebError(response.where, f"{response.where} closed the connection after {self._done} of {size} bytes")

    def _expected(self, response: "SiteResponse") -> int | None:
        """Return the length of the complete file, or None if it is unknown.

        The response should begin after the bytes received so far. If it contains the whole file, the method discards
        these bytes. If it begins at another position, the method also raises a `WebError`.
        """
        content_range = response.content_range
        if content_range is None:
            self._restart()
            length = response.length
        else:
            begin, _, total = content_range.removeprefix("bytes ").partition("/")
            if begin.partition("-")[0] != str(self._done):
                self._restart()
                raise WebError(
                    response.where, f"{response.where} sent another range of {self._file.name} than requested"
                )
            length = int(total) if total.isdecimal() else None
        size = self._file.size
        if size is not None and length is not None and length != size:
            raise ContentError(
                f"the file {self._file.name} has {length} bytes at {response.where}, but {size} were announced; "
                "check the endpoint"
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


class Downloads:
    """Downloads models' files, at most `limit` files at the same time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._permits = threading.BoundedSemaphore(limit)

    def fetch(
        self, site: "Site", name: str, listing: Listing, names: Sequence[str], cache: Snapshots, fetch: Fetch
    ) -> None:
        """Download the files `names` of repository `name` that are not cached.

        Args:
            fetch: handle to report progress and to check for cancellation.

        Raises:
            FetchAbandoned: `fetch` was canceled.
            WebError: the site is unreachable or returned an error.
            ContentError: the site sent a file whose size or checksum differs from the listing.
            DiskError: the model does not fit on the disk, or the cache is not writable.
        """
        commit, files = listing.commit, [listing.files[name] for name in names]
        transfers = Fetch(fetch.progress)  # handle of all transfers, which is canceled at the first failure
        absent = [file for file in files if not cache.has(commit, file)]
        if not absent:
            return
        meter = _Meter(files, absent, transfers)
        try:
            required, free = cache.bytes_to_fetch(absent), cache.free_bytes()
            cache.record_listing(listing)
        except OSError as error:
            raise disk_error(error, cache.folder) from error
        if required > free:
            raise disk_full_error(cache.folder, required, free)
        meter.begin(required)
        download_file = partial(self._download, site, f"/{name}/resolve/{commit}", commit, cache, meter, transfers)
        pool = ThreadPoolExecutor(min(self._limit, len(absent)), thread_name_prefix="download")
        try:
            _wait_all({pool.submit(download_file, file) for file in absent}, fetch)
        finally:
            transfers.abandon()
            # A thread may block in a read until the timeout; do not wait for it.
            pool.shutdown(wait=False, cancel_futures=True)

    def _download(
        self, site: "Site", base: str, commit: str, cache: Snapshots, meter: "_Meter", fetch: Fetch, file: RemoteFile
    ) -> None:
        advance = partial(meter.at, file)
        try:
            # Lock the file first, so that a download with a permit never waits for another download.
            with locked_file(cache.partial(file), lambda: cache.has_blob(file), fetch) as target:
                if target is not None:
                    with self._transfer_permit(fetch):
                        Transfer(site, f"{base}/{file.name}", file, target, cache.folder, advance).run(fetch.wait)
                    _rename_locked(target, cache.partial(file), cache.blob(file))
            cache.link(commit, file)
        except OSError as error:
            raise disk_error(error, cache.folder) from error
        advance(file.size or 0)

    @contextmanager
    def _transfer_permit(self, fetch: Fetch) -> Iterator[None]:
        while not self._permits.acquire(timeout=_POLL_SECONDS):
            fetch.check()
        try:
            yield
        finally:
            self._permits.release()


class _Meter:
    """Adds up the progress of the files of one model and reports the total."""

    def __init__(self, files: Sequence[RemoteFile], absent: Sequence[RemoteFile], fetch: Fetch) -> None:
        sizes = [file.size for file in files]
        self._total = 0 if None in sizes else sum(size or 0 for size in sizes)
        self._fetch = fetch
        self._lock = threading.Lock()
        self._done = {file.name: file.size or 0 for file in set(files).difference(absent)}
        self._sum = sum(self._done.values())
        self._reported = 0

    def begin(self, required: int) -> None:
        """Report the initial progress; `required` bytes are not cached yet."""
        self._fetch.progress("download", max(0, self._total - required), self._total)

    def at(self, file: RemoteFile, done: int) -> None:
        """Record `done` bytes of `file`; report the total if it changed enough."""
        self._fetch.check()
        with self._lock:
            self._sum += done - self._done.get(file.name, 0)
            self._done[file.name] = done
            # Report in steps, so that the event loop is not woken for each chunk.
            step = max(self._total // _MAX_REPORTS, _MIN_STEP_BYTES)
            if abs(self._sum - self._reported) >= step or self._sum == self._total:
                self._reported = self._sum
                self._fetch.progress("download", self._sum, self._total)


def _wait_all(futures: set[Future[None]], fetch: Fetch) -> None:
    """Wait until all `futures` are done.

    If a future fails, raise its error without waiting for the other futures. If `fetch` is canceled, raise
    `FetchAbandoned`.
    """
    while futures:
        done, futures = wait(futures, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        fetch.check()
