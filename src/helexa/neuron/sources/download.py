"""Download the files of a model concurrently and report their total progress."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

from helexa.neuron.sources.fetch import Fetch
from helexa.neuron.sources.fetch_errors import disk_error, disk_full_error
from helexa.neuron.sources.listing import Listing, RemoteFile
from helexa.neuron.sources.snapshot import Snapshots
from helexa.neuron.sources.transfer import Transfer, locked_file, rename_locked
from helexa.neuron.sources.web import Site

_POLL_SECONDS = 0.1
_MAX_REPORTS = 1000
_MIN_STEP_BYTES = 1 << 18


class Downloads:
    """Downloads the files of models and limits the number of concurrent downloads on a node.

    Args:
        limit: maximum number of files that are downloaded concurrently, over all models.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots = threading.BoundedSemaphore(limit)

    def fetch(
        self, site: Site, name: str, listing: Listing, names: Sequence[str], cache: Snapshots, fetch: Fetch
    ) -> None:
        """Download the files `names` of repository `name`. Files that are in the cache are not downloaded again.

        If the download of one file fails, the downloads of the other files are canceled.

        Args:
            site: server of the hub.
            name: name of the repository.
            listing: files of the repository at the commit to download.
            names: names of the files to download. All of them are in `listing`.
            cache: cached files of the repository.
            fetch: handle to report progress and to check for cancellation.

        Raises:
            WebError: the site is unreachable or returned an error.
            ContentError: the site sent a file whose size or checksum differs from the listing.
            DiskError: the model does not fit on the disk, or the cache is not writable.
        """
        commit, files = listing.commit, [listing.files[name] for name in names]
        transfers = Fetch(fetch.progress)  # canceled at the first failure
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
        self, site: Site, base: str, commit: str, cache: Snapshots, meter: "_Meter", fetch: Fetch, file: RemoteFile
    ) -> None:
        advance = partial(meter.at, file)
        try:
            # Lock the file before acquiring a slot, so that a download with a slot never waits for another download.
            with locked_file(cache.partial(file), lambda: cache.has_blob(file), fetch) as target:
                if target is not None:
                    with self._transfer_slot(fetch):
                        Transfer(site, f"{base}/{file.name}", file, target, cache.folder, advance).run(fetch.wait)
                    rename_locked(target, cache.partial(file), cache.blob(file))
            cache.link(commit, file)
        except OSError as error:
            raise disk_error(error, cache.folder) from error
        advance(file.size or 0)

    @contextmanager
    def _transfer_slot(self, fetch: Fetch) -> Iterator[None]:
        while not self._slots.acquire(timeout=_POLL_SECONDS):
            fetch.check()
        try:
            yield
        finally:
            self._slots.release()


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
        """Report the initial progress. `required` is the number of bytes that are not in the cache yet."""
        self._fetch.progress("download", max(0, self._total - required), self._total)

    def at(self, file: RemoteFile, done: int) -> None:
        """Record that `done` bytes of `file` are downloaded, and report the total progress if it changed enough.

        Raises:
            FetchAbandoned: the download is canceled.
        """
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
