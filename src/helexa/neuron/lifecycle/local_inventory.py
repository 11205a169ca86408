"""The models on this node's disks, with memory estimates."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import ApiError, HelexaError
from helexa.core.logs import quoted
from helexa.core.model_source_ids import ModelSource
from helexa.core.node_reports import MAX_LOCAL_MODELS, LocalModel, LocalModels
from helexa.neuron.config import NeuronConfig
from helexa.neuron.lifecycle.inspection import Inspection, Inspector
from helexa.neuron.processes.file_locks_and_threads import FileThreads
from helexa.neuron.sources.hubs_and_sources import Sources, local_model
from helexa.neuron.sources.local_models import FolderScan, FoundModel, cache_state, cached_models, folder_models

log = logging.getLogger(__name__)

FRESH_SECONDS = 1.0  # a list that was checked within this time is returned without another check

WATCH_SECONDS = 5.0
_REST = 50  # the pause after a check is at least this many times as long as the check
_SCAN_SECONDS = 60.0
# If only the size of a model's weights is known, the estimate of its memory is size * _OVERHEAD + _OVERHEAD_MB.
_OVERHEAD, _OVERHEAD_MB = 1.05, 300
_THREADS = 2

_Version = tuple[Path, int, int]  # path, modification time and size of files; a new version is inspected


@dataclass(frozen=True)
class _Scan:
    """The result of one scan of the download caches and the model folders."""

    cache_state: frozenset[tuple[str, int]] = frozenset()  # if unchanged, the caches need not be read again
    cached: tuple[FoundModel, ...] = ()
    in_folders: tuple[FoundModel, ...] = ()
    problems: tuple[str, ...] = ()  # one line for each model folder that cannot be read
    complete: bool = True  # False if a limit ended the scan of the model folders


class LocalInventory:
    """Lists the models in the caches and model folders of this node.

    The caller must run `run` as a background task. Nothing is read before the first call of `current`. From then on,
    `run` checks the folders every `WATCH_SECONDS`, or less often if a check is slow. A sandbox process estimates the
    memory of new models in the background.
    """

    def __init__(
        self, config: NeuronConfig, sources: Sources | None = None, *, is_calm: Callable[[], bool] = lambda: True
    ) -> None:
        self._config = config
        self._sources = sources or Sources(config)
        # function that returns whether models may be inspected now; False while default models load
        self._is_calm = is_calm
        step = config.harness.torch.engine_options("cpu")
        self._inspector = Inspector(step.max_step_tokens, step.max_sequences)
        self._threads = FileThreads(_THREADS, _SCAN_SECONDS)
        self._inspections: dict[_Version, Inspection] = {}
        self._scan = _Scan()
        self._checked_at: float | None = None
        self._check_secs = 0.0
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._prefix, self._changes = secrets.token_hex(4), 0
        self._list = LocalModels(downloads=config.downloads.on_request)
        self._stamp()

    @property
    def revision(self) -> str:
        """Text that changes when the list changes, and at each start of the node."""
        return self._list.revision

    async def current(self) -> LocalModels:
        """Return the models on this node; the previous list if the check fails."""
        async with self._lock:
            if self._checked_at is None or time.monotonic() - self._checked_at > FRESH_SECONDS:
                await self._check()
        self._wake.set()
        return self._list

    async def estimate_mb(self, source: ModelSource, quant: str | None) -> int | None:
        """Estimate the MiB of memory that a model needs; None if unknown.

        The estimate uses the headers of local files, or else the file sizes that a hub reports.

        Raises:
            SourceError: there is no such model.
        """
        known = [*self._scan.cached, *self._scan.in_folders]
        names = {str(source), f"{source}:{quant.upper()}"} if quant else {str(source)}
        path = next((found.path for found in known if names & {found.record.source, *found.record.names}), None)
        if source.scheme == "file":
            path = await self._threads.run(local_model, source.name)
        if path is not None and (quant is None or path.is_file()):
            seen = await self._threads.run(self._inspector.inspect, path)
            return None if seen.memory is None else -(-seen.memory >> 20)
        size = await self._sources.size(source, quant)
        return size and (int(size * _OVERHEAD) >> 20) + _OVERHEAD_MB

    def changed(self) -> None:
        """Check the folders soon, because a download has ended."""
        self._checked_at = None
        self._wake.set()

    async def run(self) -> None:
        """After the first call of `current`, check folders and inspect models forever."""
        try:
            await self._wake.wait()
            while True:
                self._wake.clear()
                if self._is_calm():
                    await self._inspect_new()
                pause = max(WATCH_SECONDS, _REST * self._check_secs)
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                async with self._lock:
                    if self._checked_at is None or time.monotonic() - self._checked_at > FRESH_SECONDS:
                        await self._check()
        finally:
            self._inspector.close()

    async def _check(self) -> None:
        began = time.monotonic()
        try:
            self._scan = await self._threads.run(_scan, self._config, self._scan)
        except HelexaError as error:
            log.warning("model folders not read error=%s; the list of models on disk may be out of date", quoted(error))
        except Exception:
            log.exception("scan of the model folders failed; the next scan tries again")
        self._checked_at = time.monotonic()
        self._check_secs = self._checked_at - began
        self._publish()

    async def _inspect_new(self) -> None:
        """Inspect the models that have not been inspected yet, one after another."""
        for found in (*self._scan.cached, *self._scan.in_folders):
            version = _version(found)
            if version is None or version in self._inspections:
                continue
            try:
                self._inspections[version] = await self._threads.run(self._inspector.inspect, version[0])
            except ApiError as error:
                log.info("inspection of models is postponed error=%s", quoted(error))
                break  # all threads are busy with other files, so the model is inspected later
            except HelexaError as error:
                self._inspections[version] = Inspection(problem=str(error))
            self._publish()
        self._inspector.close()
        known = {_version(found) for found in (*self._scan.cached, *self._scan.in_folders)}
        self._inspections = {version: seen for version, seen in self._inspections.items() if version in known}

    def _publish(self) -> None:
        """Build the list of models; if it has changed, give it a new revision."""
        models: dict[str, LocalModel] = {}
        for found in (*self._scan.cached, *self._scan.in_folders):  # the caches come first: their ids take precedence
            record = self._inspected(found)
            if record.id not in models:
                models[record.id] = record
        ordered = [models[model_id] for model_id in sorted(models)]
        new = LocalModels(
            revision=self._list.revision,
            models=ordered[:MAX_LOCAL_MODELS],
            complete=self._scan.complete and len(ordered) <= MAX_LOCAL_MODELS,
            problems=list(self._scan.problems),
            downloads=self._list.downloads,
        )
        if new != self._list:
            self._list = new
            self._stamp()

    def _inspected(self, found: FoundModel) -> LocalModel:
        version = _version(found)
        seen = None if version is None else self._inspections.get(version)
        if seen is None:
            return found.record
        memory_mb = None if seen.memory is None else -(-seen.memory >> 20)
        return found.record.model_copy(
            update={
                "memory_mb": memory_mb,
                "context": seen.context,
                "architecture": seen.architecture,
                "parameters": seen.parameters,
                "capabilities": [] if seen.problem else ["text", "vision"] if seen.vision else ["text"],
                "tool_call": seen.tool_call,
                "reasoning": seen.reasoning,
                "problem": seen.problem[:500] or None,
            }
        )

    def _stamp(self) -> None:
        self._list.revision = f"{self._prefix}-{self._changes}"
        self._changes += 1


def _version(found: FoundModel) -> _Version | None:
    return None if found.path is None else (found.path, found.version, found.record.size_bytes)


def _scan(config: NeuronConfig, last: _Scan) -> _Scan:
    """Return the models in all folders; read the caches again only if changed."""
    state = cache_state(config)
    cached = last.cached if state == last.cache_state else tuple(cached_models(config))
    folders = FolderScan()
    for folder in config.models_dirs:
        folders.add(folder)
    return _Scan(state, cached, tuple(folder_models(folders)), tuple(folders.problems), folders.complete)
