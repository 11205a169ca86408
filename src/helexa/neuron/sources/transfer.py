"""Download one file into the cache: resume a partial file, verify the checksum, then rename it."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from helexa.neuron.sources.fetch import Fetch
from helexa.neuron.sources.listing import RemoteFile
from helexa.neuron.sources.trouble import ContentError, disk_error
from helexa.neuron.sources.web import Answer, Site, WebError

_TRIES = 5
_LONGEST_PAUSE_SECONDS = 60
_NOTEWORTHY_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_MOST_AT_ONCE = 32 << 30  # the content networks of hubs serve much larger files only in parts
_LOCK_SECONDS = 0.2


def pause(failures: int, error: WebError) -> int | None:
    """Return the seconds to wait after `failures` consecutive failures, the last of them `error`; None: give up."""
    if not error.passing or failures >= _TRIES:
        return None
    if error.retry_after is not None:
        return max(1, error.retry_after) if error.retry_after <= _LONGEST_PAUSE_SECONDS else None
    return 2 ** (failures - 1)


@contextmanager
def claimed(path: Path, taken: Callable[[], bool], fetch: Fetch) -> Iterator[FileIO | None]:
    """Open the file at `path` for reading and appending, locked against other processes; None once `taken` returns
    True.

    While waiting for the lock, the file's size is reported to `fetch`.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while not taken():
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
            if taken():
                path.unlink()
                break
            yield file
            return
    yield None


def named(file: FileIO, path: Path, name: Path) -> None:
    """Rename the locked file at `path` to `name`.

    Raises:
        OSError: the file was removed, or another process replaced it.
    """
    if not _is_at(file, path):
        raise FileNotFoundError(errno.ENOENT, "a file was taken away while it was fetched")
    path.replace(name)


class Transfer:
    """Downloads a file of a repository into `target`.

    Args:
        site: server of the file.
        path: path of the file at the site.
        file: expected size and checksum.
        target: locked file; may hold the beginning of the content.
        folder: cache folder named in error messages.
        advance: called after each chunk with the number of bytes present; may raise to end the transfer.
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
        self._furthest = 0
        self._complete = False
        self._sum = file.checksum()

    def run(self, wait: Callable[[float], None]) -> None:
        """Download the missing bytes and verify the checksum.

        Received bytes stay in the target for the next transfer, unless the content is wrong.

        Raises:
            WebError: the site failed too often in a row.
            ContentError: the site sent other content than announced.
            DiskError: the target cannot be written.
        """
        self._take_up()
        taken_up = self._done > 0
        while True:
            self._receive_all(wait)
            if self._sum is None or self._file.is_sum(self._sum.hexdigest()):
                break
            found = self._sum.hexdigest()
            self._restart()
            if not taken_up:
                raise ContentError(
                    f"cannot be used: {self._file.name} has checksum {found}, "
                    f"but {self._file.sha256 or self._file.git_id} was announced; what came was thrown away"
                )
            taken_up = False
        try:
            os.fsync(self._target.fileno())
        except OSError as error:
            raise disk_error(error, self._folder) from error

    def _take_up(self) -> None:
        """Resume from the bytes of an earlier transfer."""
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
                if self._done >= self._furthest + _NOTEWORTHY_BYTES:
                    failures = 0
                self._furthest = max(self._furthest, self._done)
                failures += 1
                seconds = pause(failures, error)
                if seconds is None:
                    raise
                wait(seconds)

    def _receive(self) -> None:
        rest = 0 if self._file.size is None else self._file.size - self._done
        stop = self._done + _MOST_AT_ONCE if rest > _MOST_AT_ONCE else None
        try:
            answer = self._site.get(self._path, self._done, stop)
        except WebError as error:
            if error.status == 416 and self._done:  # the file at the site is shorter than the partial file
                self._restart()
                error.passing = True
            raise
        with answer:
            size = self._expected(answer)
            begun = self._done
            for chunk in answer.chunks():
                if size is not None and self._done + len(chunk) > size:
                    self._restart()
                    raise ContentError(f"cannot be used: {answer.where} sends more of {self._file.name} than announced")
                try:
                    _write(self._target, chunk)
                except OSError as error:
                    raise disk_error(error, self._folder) from error
                self._count(chunk)
        self._complete = size in (None, self._done)
        if not self._complete and (answer.length is None or self._done == begun):
            raise WebError(answer.where, f"hung up after {self._done} of {size} bytes")

    def _expected(self, answer: Answer) -> int | None:
        """Return the length of the file, or None if unknown. Discard present bytes if the answer does not continue
        them.
        """
        part = answer.content_range
        if part is None:
            self._restart()
            length = answer.length
        else:
            begin, _, total = part.removeprefix("bytes ").partition("/")
            if begin.partition("-")[0] != str(self._done):
                self._restart()
                raise WebError(answer.where, f"sends another part of {self._file.name} than asked for")
            length = int(total) if total.isdecimal() else None
        size = self._file.size
        if size is not None and length is not None and length != size:
            raise ContentError(
                f"cannot be used: {self._file.name} has {length} bytes at {answer.where}, but {size} were announced"
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
    rest = memoryview(chunk)
    while rest:
        rest = rest[target.write(rest) :]


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
