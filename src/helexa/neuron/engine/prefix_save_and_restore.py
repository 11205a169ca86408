"""Moves KV pages and state snapshots between the KV cache and the disk.

A page is saved after its sequence has ended: the engine loop copies a few pages between two steps, or many while the
engine is idle, and a thread writes the copies. A page that leaves the KV cache before it was saved is lost. A new
prompt whose beginning is on disk waits until a thread has read the pages, while other sequences go on. The pages are
then in the prefix cache as if they had just been computed.
"""

import logging
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from helexa.core.logs import quoted
from helexa.neuron.cache_folder import PROMPTS_FOLDER, cache_root
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.message_and_pixel_sockets import MAX_FRAME_BYTES
from helexa.neuron.engine.ipc.messages import DiskUse
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.prefix_disk import (
    NAME,
    PAGE,
    STATE,
    WINDOW,
    PrefixDisk,
    ReadRecord,
    RecordReader,
    most_together,
    namespace,
)
from helexa.neuron.engine.scheduling.page_allocation_and_prefix_hits import Memory
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.processes import heartbeat

_log = logging.getLogger("helexa.neuron.engine")

_LEAST_PAGES = 2  # minimum number of pages to read from disk, because fewer pages are computed as fast as they are read
_PAGES_BESIDE_STEPS = 2  # pages that are copied between two steps, in each direction
_PAGES_WHILE_IDLE = 16
# Maximum size of the copies that wait for the disk. The records that wait for the KV cache may take as much again.
_QUEUED_BYTES = 64 << 20
_MOST_UNSAVED = 1 << 16  # maximum number of pages and snapshots that wait to be copied
_MOST_HELD = 256  # maximum number of sequences that wait for pages from disk
_OPEN_SECS = 1.0  # maximum time for which the engine waits until the records are known
_SILENT_SECS = 10.0  # without a record for this long, the disk counts as unreachable
_PROBED_RECORDS = 4  # number of records read to measure a slow disk again


class PrefixStore:
    """The disk as a second level of an engine's prefix cache.

    All methods are called by the engine loop, between two steps.

    Args:
        open_disk: opens the records. It is called in a thread at the first long prompt, because it reads the headers of
            all records.
        memory: allocates `pages` and `states`.
        states: the state pool; None for a model without recurrent layers.
        runner: the owner of the KV cache.
        prompt_bytes: maximum size of the records of one prompt.
    """

    def __init__(
        self,
        open_disk: Callable[[], PrefixDisk],
        memory: Memory,
        pages: PagePool,
        states: StatePool | None,
        runner: Runner,
        prompt_bytes: int,
    ) -> None:
        self._read_tokens = self._read_prompts = 0  # numbers of tokens and prompts whose pages were read from disk
        self._memory, self._pages, self._states, self._runner = memory, pages, states, runner
        self._windows = pages.windows
        self._disk: PrefixDisk | None = None
        self._sizes = {PAGE: sum(runner.page_parts), WINDOW: sum(runner.window_parts), STATE: sum(runner.state_parts)}
        self._prompt_bytes = prompt_bytes
        # Maximum number of records in a queue. It follows from the largest kind of record: a state snapshot of a hybrid
        # model is many times larger than a page.
        self._depth = max(1, _QUEUED_BYTES // max(self._sizes.values()))
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()  # keys of the records to save, in this order
        # Keys and contents that the writer writes, at most `_depth`. Empty contents remove the record, and an empty key
        # removes all records.
        self._copies: queue.SimpleQueue[tuple[bytes, list[bytes]] | None] = queue.SimpleQueue()
        self._names: dict[bytes, bytes] = {}  # contents of the `NAME` records in `_unsaved`
        self.saved_prefixes: dict[str, bytes] = {}  # page hashes by prefix key, of earlier engines
        self._held: dict[int, Sequence] = {}  # the sequences that wait for pages from disk, by id
        self._stale: set[int] = set()  # ids of the held sequences whose records were cleared
        self._token_secs = 0.0  # measured seconds to compute a prompt token; 0: unknown
        self._heard = 0.0  # time of the latest record from the reader, or of the latest start of waiting
        self._silent = self._probing = False  # whether the disk is unreachable, and whether it is measured again
        self._reader = RecordReader(self._depth, self._held.__contains__, self._wake)
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        memory.on_release, memory.on_discard = self._note, self._remove
        self._opened, self._opens_by = threading.Event(), 0.0
        self._writer = threading.Thread(target=self._write, args=(open_disk,), name="prefix-writer", daemon=True)

    def __len__(self) -> int:
        """Return the number of sequences that wait for pages from disk."""
        return len(self._held)

    def fileno(self) -> int:
        """Return a file descriptor for `select`, readable when `move` has work."""
        return self._ours.fileno()

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn the seconds per token from a prefill-only step of `tokens` tokens."""
        if tokens < self._pages.page_size:  # the duration of a short step hardly depends on its tokens
            return
        latest = seconds / tokens
        self._token_secs = latest if not self._token_secs else 0.8 * self._token_secs + 0.2 * latest

    def begin(self, sequence: Sequence) -> bool:
        """Start to read the beginning of a new sequence, if it is on disk and this pays.

        Return True if the sequence must wait until `move` returns it. The first call may block for up to `_OPEN_SECS`.
        """
        # The last token is always computed, because its logits are needed.
        full_pages = (len(sequence.tokens) - 1) // self._pages.page_size
        if full_pages < _LEAST_PAGES or not self._memory.may_reuse(sequence):
            return False
        self.start()
        # The engine waits only once for the records of a slow disk, at most `_OPEN_SECS` after `start`. Later prompts
        # are computed until the records are known.
        self._opened.wait(max(self._opens_by - time.monotonic(), 0.0))
        disk = self._disk
        if disk is None or self._silent or len(self._held) >= _MOST_HELD:
            return False
        cached = self._memory.cached_pages(sequence)
        self._memory.extend_chain(sequence, full_pages)
        chain = sequence.chain
        end = 0
        while end < full_pages and (self._pages.holds(chain[end + 1]) or PAGE + chain[end + 1] in disk):
            end += 1
        if self._states is not None:  # a sequence starts only where there is a snapshot
            while end > cached and not (self._holds(STATE + chain[end]) or STATE + chain[end] in disk):
                end -= 1
        wanted = [(PAGE + chain[n], n) for n in range(1, end + 1) if not self._pages.holds(chain[n])]
        if self._windows is not None:
            keys = [WINDOW + page_hash for page_hash in chain[1 : end + 1]]
            end = self._windows.usable(end, lambda index: self._holds(keys[index]) or keys[index] in disk)
            wanted = [(key, n) for key, n in wanted if n <= end]
            first = self._windows.first_needed(end * self._pages.page_size)
            needed = [(WINDOW + chain[n], n) for n in range(first + 1, end + 1)]
            wanted += [(key, n) for key, n in needed if not self._holds(key)]
        if self._states is not None and end > cached and not self._holds(STATE + chain[end]):
            wanted.append((STATE + chain[end], end))
        if end < cached + _LEAST_PAGES or len(wanted) > self._pages.free:
            return False
        if not self._pays(sum(self._sizes[key[:1]] for key, _ in wanted), end - cached):
            if not self._probing:  # the disk may be faster now than when it was measured
                self._probing = True
                self._reader.request(None, wanted[:_PROBED_RECORDS])
            return False
        self._touch(chain[1 : end + 1])
        if not self._held:
            self._heard = time.monotonic()
        self._held[sequence.id] = sequence
        self._reader.request(sequence.id, wanted)
        return True

    def cancel(self, sequence_id: int) -> None:
        """Drop a sequence, if it waits for pages."""
        self._held.pop(sequence_id, None)
        self._stale.discard(sequence_id)

    def move(self, *, idle: bool) -> list[Sequence]:
        """Move pages in both directions; return the held sequences that can start now.

        Args:
            idle: whether no sequence waits for the next step; otherwise only few pages are moved.
        """
        limit = _PAGES_WHILE_IDLE if idle else _PAGES_BESIDE_STEPS
        with suppress(BlockingIOError):
            self._ours.recv(4096)
        ready: list[Sequence] = []
        for _ in range(limit):
            if self._reader.records.empty():
                break
            record = self._reader.records.get()
            self._heard, self._silent = time.monotonic(), False
            if record.sequence_id is None:
                self._probing = False
            elif (sequence := self._held.get(record.sequence_id)) is None:  # the sequence was canceled
                continue
            elif not record.key:
                self._read_prompts += record.pages > 0
                ready.append(self._release(sequence))
            elif sequence.id not in self._stale:
                self._insert(record)
        if self._held:
            heartbeat.beat()  # so that a slow disk does not count as a hang of the engine
            if time.monotonic() - self._heard > _SILENT_SECS:
                _log.warning(
                    "disk with saved prompts does not respond seconds=%d; the prompts are computed again", _SILENT_SECS
                )
                self._silent = True
                ready += [self._release(sequence) for sequence in list(self._held.values())]
        self._save(limit)
        return ready

    def _release(self, sequence: Sequence) -> Sequence:
        """Remove `sequence` from the sequences that wait for pages, and return it."""
        del self._held[sequence.id]
        self._stale.discard(sequence.id)
        self._touch(sequence.chain[1:])
        return sequence

    @property
    def has_work(self) -> bool:
        """Whether `move` could move pages now."""
        return not self._reader.records.empty() or (bool(self._unsaved) and not self._full)

    @property
    def _full(self) -> bool:
        """Whether the maximum number of copies waits for the writer."""
        return self._copies.qsize() >= self._depth

    @property
    def started(self) -> bool:
        """Whether the records are known, or are being read."""
        return bool(self._writer.ident)

    def on_disk(self, page_hash: bytes) -> bool:
        """Return whether the page with this hash is on disk."""
        return self._disk is not None and PAGE + page_hash in self._disk

    def start(self) -> None:
        """Start the thread that reads the headers of all records, unless it runs."""
        if not self._writer.ident:
            self._opens_by = time.monotonic() + _OPEN_SECS
            self._writer.start()

    @property
    def _accepts(self) -> bool:
        """Whether pages can be saved. True until the records are opened."""
        return not self._opened.is_set() or (self._disk is not None and self._disk.writes)

    @property
    def use(self) -> DiskUse:
        """Numbers of tokens, prompts and bytes read so far, and the size of the records."""
        return DiskUse(
            tokens=self._read_tokens,
            prompts=self._read_prompts,
            read_bytes=self._reader.read_bytes,
            read_ms=round(self._reader.read_secs * 1000),
            size=0 if self._disk is None else self._disk.size,
        )

    def clear(self) -> None:
        """Drop pages being saved or read; let the writer, if started, delete all records."""
        self._unsaved.clear()
        self._names.clear()
        self.saved_prefixes = {}
        self._stale |= self._held.keys()
        with suppress(queue.Empty):
            while True:
                self._copies.get_nowait()
        if self._writer.ident:  # otherwise this engine knows no records; the server deletes the files
            self._copies.put((b"", []))

    def close(self, secs: float) -> None:
        """Save the queued pages for at most `secs` seconds, and end the threads."""
        end = time.monotonic() + secs
        while self._unsaved and time.monotonic() < end:
            self._save(self._depth)
            if self._full:
                time.sleep(0.001)
        self._reader.close()
        if self._writer.is_alive():
            self._copies.put(None)
            self._writer.join(max(end - time.monotonic(), 0.1))
        self._ours.close()
        self._theirs.close()

    def _note(self, sequence: Sequence) -> None:
        """Queue the pages of a sequence that ends or is preempted, to save them to disk."""
        chain = sequence.chain
        last = min(sequence.computed // self._pages.page_size, len(chain) - 1)
        if last < _LEAST_PAGES or not self._accepts:
            return
        room = self._prompt_bytes
        for page_hash in chain[1 : last + 1]:
            for key in (PAGE + page_hash, WINDOW + page_hash, STATE + page_hash):
                saved = self._disk is not None and key in self._disk
                if not saved and not self._holds(key):
                    continue
                room -= self._sizes[key[:1]]
                if not saved and room >= 0 and len(self._unsaved) < _MOST_UNSAVED:
                    self._unsaved[key] = None
            # The rest of a longer prompt is not saved. It would replace the beginning of the prompt on disk, and is of
            # no use without the beginning.
            if room < 0:
                break

        if (half := sequence.half_page) is not None:
            key = NAME + bytes.fromhex(sequence.request.prefix_key).ljust(16, b"\0")
            if len(self._names) < _MOST_UNSAVED and (self._disk is None or key not in self._disk):
                self._unsaved[key], self._names[key] = None, half

    def _remove(self, sequence: Sequence) -> None:
        """Remove the records of a sequence whose pages may contain NaN or infinity."""
        for page_hash in sequence.chain[1:]:
            for key in (PAGE + page_hash, WINDOW + page_hash, STATE + page_hash):
                self._unsaved.pop(key, None)
                # The writer handles the removal after the queued copies with the same key.
                if self._writer.ident:
                    self._copies.put((key, []))

    def _holds(self, key: bytes) -> bool:
        """Return whether the KV cache has the page, window page or snapshot of a record."""
        kind, page_hash = key[:1], key[1:]
        if kind == STATE:
            return self._states is not None and self._states.holds(page_hash)
        return self._pages.holds(page_hash) if kind == PAGE else self._pages.has_window_page(page_hash)

    def _save(self, limit: int) -> None:
        """Copy up to `limit` pages and snapshots, which the writer thread then saves."""
        if not self._unsaved:
            return
        self.start()
        if not self._accepts:
            self._unsaved.clear()
            self._names.clear()
        while limit and self._unsaved and not self._full:
            key, _ = self._unsaved.popitem(last=False)
            contents = self._contents(key)
            if contents is not None:  # otherwise the page has left the cache
                self._copies.put((key, contents))
                limit -= 1

    def _contents(self, key: bytes) -> list[bytes] | None:
        kind, page_hash = key[:1], key[1:]
        if kind == NAME:
            return [self._names.pop(key)]
        if not self._holds(key):
            return None
        page = self._pages.page_of(page_hash)
        if kind == WINDOW and self._windows is not None:
            return self._runner.read_cache("window", int(self._windows.numbers[page]))
        if kind == PAGE and page is not None:
            return self._runner.read_cache("page", page)
        assert self._states is not None
        # Only `pin` returns the slot of a snapshot. The pin is not kept, because the copy is made before the next step.
        slot = self._states.pin(page_hash)
        self._states.unpin(slot)
        return self._runner.read_cache("state", slot)

    def _insert(self, record: ReadRecord) -> None:
        """Put a record into the KV cache; drop it if no page or slot is free."""
        kind, page_hash = record.key[:1], record.key[1:]
        if kind == PAGE:
            if self._pages.holds(page_hash) or not self._pages.free:
                return
            (page,) = self._pages.take(1)
            if self._runner.write_cache("page", page, record.contents):
                self._pages.register(page, page_hash)
                self._read_tokens += self._pages.page_size
            self._pages.give_back([page])
        elif kind == WINDOW:
            page = self._pages.page_of(page_hash)
            if self._windows is None or page is None or self._windows.holds(page) or not self._windows.free:
                return
            self._windows.take([page])
            written = self._runner.write_cache("window", int(self._windows.numbers[page]), record.contents)
            self._windows.give_back([page])
            if not written:
                self._windows.drop(page)
        elif self._states is not None and not self._states.holds(page_hash):
            slot = self._states.reserve()
            if slot is None:
                return
            if self._runner.write_cache("state", slot, record.contents):
                self._states.register(slot, page_hash, record.pages)
            else:
                self._states.unreserve(slot)

    def _touch(self, hashes: list[bytes]) -> None:
        """Mark the pages of `hashes` as recently used, the first as the most recent."""
        pages = self._pages.match(hashes)
        self._pages.share(pages)
        self._pages.give_back(pages)

    def _pays(self, bytes_: int, pages: int) -> bool:
        """Return whether reading `bytes_` bytes is faster than computing `pages` pages."""
        if not self._reader.bytes_per_sec or not self._token_secs:
            return True
        return bytes_ / self._reader.bytes_per_sec < pages * self._pages.page_size * self._token_secs

    # The following methods run in the threads of the writer and of the reader.

    def _wake(self) -> None:
        with suppress(OSError):  # the socket is closed; or it is full, and `select` returns without this byte
            self._theirs.send(b"\0")

    def _write(self, open_disk: Callable[[], PrefixDisk]) -> None:
        try:
            disk = open_disk()
        except Exception as error:  # the engine works without a disk
            _log.warning(
                "prompts not saved to disk error=%s; correct the cause, or set prefix_disk_mb to 0", quoted(error)
            )
            self._opened.set()
            while self._copies.get() is not None:
                pass  # drop copies that were queued before the error
            return
        # The loop reports the prefixes when the size of the disk changes, so they must be known before the disk.
        self.saved_prefixes = disk.names()
        self._disk = disk
        self._reader.start(disk)
        self._opened.set()
        self._wake()
        while (copied := self._copies.get()) is not None:
            key, contents = copied
            if contents:
                disk.write(key, contents)
            elif key:
                disk.remove(key)
            else:
                disk.clear()
            self._wake()
        disk.close()


def open_store(
    model: Path, options: EngineOptions, runner: Runner, memory: Memory, pages: PagePool, states: StatePool | None
) -> PrefixStore | None:
    """Return the store of a model's prompts; None if saving is off or impossible."""
    if not options.prefix_disk_mb or options.prefix_reuse == "off" or not runner.reads_caches:
        return None
    largest = max([*runner.page_parts, *runner.window_parts, *runner.state_parts])
    if not runner.computes_alone and largest > MAX_FRAME_BYTES // 2:  # the other ranks send their parts in frames
        _log.warning(
            "prompts not saved to disk largest_mb=%d; one page of this model's cache is too large to be sent between "
            "ranks or hosts",
            largest >> 20,
        )
        return None
    prompt_bytes = most_together(options.prefix_disk_mb << 20)
    return PrefixStore(partial(_disk, model, options, runner), memory, pages, states, runner, prompt_bytes)


def _disk(model: Path, options: EngineOptions, runner: Runner) -> PrefixDisk:
    folder = cache_root(None) / PROMPTS_FOLDER / namespace(model, options, runner)
    return PrefixDisk(folder, options.prefix_disk_mb << 20, options.model_id or model.name)
