"""Loads and downloads in the background: default models, and pulls of clients."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from helexa.core import fleet
from helexa.core.errors import ApiError, HelexaError, SourceError, service_unavailable
from helexa.core.fleet import FailedLoad, ModelSpec, Pull, PullRequest
from helexa.core.model_names import ModelSource, bare_id
from helexa.neuron.builtin_models import BUILTIN_MODELS
from helexa.neuron.config import NeuronConfig
from helexa.neuron.lifecycle.registry import AlreadyLoadedError, Registry
from helexa.neuron.sources.sources import Sources

log = logging.getLogger(__name__)

ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 300.0

MAX_RUNNING = 2  # maximum number of concurrent downloads, each of several files

_MAX_ENDED = 20  # ended downloads whose result is kept
_RETRY_SECONDS = 30


class Activation:
    """Loads the default models one after another.

    A model whose download fails stays pending. After one attempt for each model, the node waits and then retries the
    pending models. It makes at most `ATTEMPTS` attempts per model. A load that fails with any other error than a failed
    download is not retried.
    """

    def __init__(
        self,
        registry: Registry,
        specs: Sequence[ModelSpec],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._registry = registry
        self._sleep = sleep
        self._waiting = {bare_id(spec.model_id): spec for spec in specs}
        self._state = fleet.Activation(state="pre_warming" if specs else "ready")
        registry.awaited |= self._waiting.keys()

    def snapshot(self) -> fleet.Activation:
        """Return the state of the default models' loads for `GET /health`."""
        pending = [model_id for model_id in self._waiting if model_id != self._state.in_progress]
        return self._state.model_copy(update={"pending": pending}, deep=True)

    async def run(self) -> None:
        """Load all default models; return when each is loaded or has failed."""
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            for model_id, spec in list(self._waiting.items()):
                await self._load(model_id, spec, last=attempt == ATTEMPTS)
            if not self._waiting:
                break
            log.warning("downloads of default models failed; retrying in %.0f s", pause)
            await self._sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._state.state = "ready"

    async def _load(self, model_id: str, spec: ModelSpec, *, last: bool) -> None:
        self._state.in_progress = model_id
        try:
            await self._registry.load(spec, self._on_progress)
        except AlreadyLoadedError:
            self._settle(model_id)
        except SourceError as error:
            log.error("default model %s: %s", model_id, error)
            if last or error.kind != "repo_fetch_failed":
                self._settle(model_id, str(error))
        except HelexaError as error:
            log.error("default model %s: %s", model_id, error)
            self._settle(model_id, str(error))
        except Exception:
            log.exception("default model %s", model_id)
            self._settle(model_id, "internal error; see the node's log")
        else:
            self._settle(model_id)
        finally:
            self._state.in_progress = self._state.stage = self._state.progress = None

    def _settle(self, model_id: str, error: str | None = None) -> None:
        del self._waiting[model_id]
        self._registry.awaited.discard(model_id)
        if error is None:
            self._state.completed.append(model_id)
        else:
            self._state.failed.append(FailedLoad(model_id=model_id, error=error))

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        self._state.stage = stage
        self._state.progress = round(done / total, 4) if total else None


class Pulls:
    """Runs and cancels downloads. Downloads of the same model are one download."""

    def __init__(self, config: NeuronConfig, sources: Sources, ended: Callable[[], None] = lambda: None) -> None:
        self._allowed = config.downloads.on_request
        self._default_source = config.harness.torch.default_source
        self._sources = sources
        self._ended = ended
        self._pulls: dict[str, Pull] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def all(self) -> list[Pull]:
        """Return the running and the last ended downloads, in order of start."""
        return list(self._pulls.values())

    def start(self, request: PullRequest) -> Pull:
        """Start a download, or return the running download of the same model.

        Raises:
            ApiError: 403 if the configuration forbids downloads; 503 if the maximum number of downloads
                runs already.
            SourceError: the model's name is not a source id.
        """
        if not self._allowed:
            message = "this node downloads no models on request; set on_request in [downloads] of its neuron.toml"
            raise ApiError(403, "downloads_disabled", message, type="permission_error")
        builtin = BUILTIN_MODELS.get(request.model)
        source = ModelSource.parse(builtin.source if builtin else request.model, self._default_source)
        quant = source.quant(request.quant)
        if request.model in self._tasks:
            return self._pulls[request.model]
        if len(self._tasks) >= MAX_RUNNING:
            raise service_unavailable(
                f"{MAX_RUNNING} downloads are already running; retry when one has ended", retry_after=_RETRY_SECONDS
            )
        self._forget()
        pull = Pull(model=request.model)
        self._pulls.pop(request.model, None)
        self._pulls[request.model] = pull
        self._tasks[request.model] = asyncio.create_task(self._run(pull, source, quant))
        return pull

    def cancel(self, model: str) -> Pull | None:
        """Cancel the running download of a model; return its state, or None."""
        task = self._tasks.pop(model, None)
        if task is None:
            return None
        task.cancel()
        pull = self._pulls[model]
        pull.status = "canceled"
        return pull

    async def close(self) -> None:
        """Cancel all downloads."""
        tasks = list(self._tasks.values())
        for model in list(self._tasks):
            self.cancel(model)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, pull: Pull, source: ModelSource, quant: str | None) -> None:
        def report(stage: str, done: int, total: int) -> None:
            if pull.status == "running":
                pull.stage, pull.done, pull.total = stage, done, total or None

        log.info("downloading model=%s source=%s", pull.model, source)
        try:
            await self._sources.resolve(source, quant=quant, progress=report)
        except asyncio.CancelledError:
            pull.status = "canceled"
            log.info("canceled download model=%s", pull.model)
        except HelexaError as error:
            pull.status, pull.error = "failed", str(error)
            log.warning("download failed model=%s: %s", pull.model, error)
        except Exception:
            pull.status, pull.error = "failed", "internal error; see the node's log"
            log.exception("download failed model=%s", pull.model)
        else:
            pull.status, pull.stage = "done", None
            log.info("downloaded model=%s", pull.model)
        finally:
            if self._tasks.get(pull.model) is asyncio.current_task():  # otherwise it was canceled
                del self._tasks[pull.model]
            self._ended()

    def _forget(self) -> None:
        """Forget the oldest ended downloads."""
        ended = [model for model in self._pulls if model not in self._tasks]
        for model in ended[: max(0, len(ended) - _MAX_ENDED + 1)]:
            del self._pulls[model]
