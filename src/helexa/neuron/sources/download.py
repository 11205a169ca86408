"""Download several files concurrently and report their total progress."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

from helexa.neuron.sources.fetch import Fetch
from helexa.neuron.sources.listing import Listing, RemoteFile
from helexa.neuron.sources.snapshot import Snapshots
from helexa.neuron.sources.transfer import Transfer, claimed, named
from helexa.neuron.sources.trouble import disk_error, no_room
from helexa.neuron.sources.web import Site

_LOOK_SECONDS = 0.1
_REPORTS = 1000
_LEAST_STEP_BYTES = 1 << 18


class Downloads:
    """All downloads of a node.

    Args:
        limit: number of concurrent file downloads, over all models.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots = threading.BoundedSemaphore(limit)

    def fetch(
        self, site: Site, name: str, listing: Listing, names: Sequence[str], into: Snapshots, fetch: Fetch
    ) -> None:
        """Download the files of repository `name` that are not in the cache.

        Args:
            site: server of the hub.
            name: name of the repository.
            listing: listing of the repository.
            names: names of the files; all are in `listing`.
            into: cache of the repository.
            fetch: handle for progress and cancellation.

        Raises:
            WebError, ContentError, DiskError: a file failed; the other transfers are canceled.
        """
        commit, files = listing.commit, [listing.files[name] for name in names]
        ours = Fetch(fetch.progress)  # canceled at the first failure
        absent = [file for file in files if not into.has(commit, file)]
        if not absent:
            return
        meter = _Meter(files, absent, ours)
        try:
            required, free = into.bytes_to_fetch(absent), into.room()
            into.note(listing)
        except OSError as error:
            raise disk_error(error, into.folder) from error
        if required > free:
            raise no_room(into.folder, required, free)
        meter.begin(required)
        bring = partial(self._bring, site, f"/{name}/resolve/{commit}", commit, into, meter, ours)
        pool = ThreadPoolExecutor(min(self._limit, len(absent)), thread_name_prefix="download")
        try:
            _see_through({pool.submit(bring, file) for file in absent}, fetch)
        finally:
            ours.abandon()
            # A thread may block in a read until the timeout; do not wait for it.
            pool.shutdown(wait=False, cancel_futures=True)

    def _bring(
        self, site: Site, base: str, commit: str, into: Snapshots, meter: "_Meter", fetch: Fetch, file: RemoteFile
    ) -> None:
        advance = partial(meter.at, file)
        try:
            # Lock the file before taking a slot, so that a slot's holder never waits for another download.
            with claimed(into.partial(file), lambda: into.has_blob(file), fetch) as target:
                if target is not None:
                    with self._slot(fetch):
                        Transfer(site, f"{base}/{file.name}", file, target, into.folder, advance).run(fetch.wait)
                    named(target, into.partial(file), into.blob(file))
            into.link(commit, file)
        except OSError as error:
            raise disk_error(error, into.folder) from error
        advance(file.size or 0)

    @contextmanager
    def _slot(self, fetch: Fetch) -> Iterator[None]:
        while not self._slots.acquire(timeout=_LOOK_SECONDS):
            fetch.check()
        try:
            yield
        finally:
            self._slots.release()


class _Meter:
    """Adds up the progress of several transfers. A canceled transfer ends in `at`."""

    def __init__(self, files: Sequence[RemoteFile], absent: Sequence[RemoteFile], fetch: Fetch) -> None:
        sizes = [file.size for file in files]
        self._total = 0 if None in sizes else sum(size or 0 for size in sizes)
        self._fetch = fetch
        self._lock = threading.Lock()
        self._done = {file.name: file.size or 0 for file in set(files).difference(absent)}
        self._sum = sum(self._done.values())
        self._told = 0

    def begin(self, required: int) -> None:
        """Report that `required` bytes are missing."""
        self._fetch.progress("download", max(0, self._total - required), self._total)

    def at(self, file: RemoteFile, done: int) -> None:
        """Report that `done` bytes of `file` are present."""
        self._fetch.check()
        with self._lock:
            self._sum += done - self._done.get(file.name, 0)
            self._done[file.name] = done
            # The event loop is not woken for each chunk.
            step = max(self._total // _REPORTS, _LEAST_STEP_BYTES)
            if abs(self._sum - self._told) >= step or self._sum == self._total:
                self._told = self._sum
                self._fetch.progress("download", self._sum, self._total)


def _see_through(work: set[Future[None]], fetch: Fetch) -> None:
    """Wait until all work is done, one part failed, or the fetch is canceled."""
    while work:
        done, work = wait(work, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        fetch.check()
