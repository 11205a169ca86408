"""Downloads in the background, which clients request (`POST /models/pull`)."""

import asyncio
import logging
from collections.abc import Callable

from helexa.core.errors import ApiError, HelexaError, service_unavailable
from helexa.core.logs import quoted
from helexa.core.model_source_ids import ModelSource
from helexa.core.node_reports import Pull, PullRequest
from helexa.neuron.builtin_models import BUILTIN_MODELS
from helexa.neuron.config import NeuronConfig
from helexa.neuron.sources.hubs_and_sources import Sources

log = logging.getLogger(__name__)

MAX_RUNNING = 2  # maximum number of concurrent downloads, each of several files
_MAX_ENDED = 20  # ended downloads whose result is kept
_RETRY_SECONDS = 30


class Pulls:
    """Runs and cancels a node's downloads (pulls). Equal requests share a download."""

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

        The returned object is updated until the download ends.

        Raises:
            ApiError: 403 if the configuration forbids downloads; 503 if the maximum number of downloads runs already.
            SourceError: the model's name is not a source id.
        """
        if not self._allowed:
            message = (
                "this node downloads no models on request; set on_request = true in [downloads] of its neuron.toml"
            )
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
        """Cancel a model's download; return its state, or None if no download runs."""
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

        log.info("downloading model=%s source=%s", quoted(pull.model), quoted(source))
        try:
            await self._sources.resolve(source, quant=quant, progress=report)
        except asyncio.CancelledError:
            pull.status = "canceled"
            log.info("download canceled model=%s", quoted(pull.model))
        except HelexaError as error:
            pull.status, pull.error = "failed", str(error)
            fields = (quoted(pull.model), quoted(error))
            log.warning("download failed model=%s error=%s; request the download again to resume", *fields)
        except Exception:
            pull.status, pull.error = "failed", "internal error; see the node's log"
            log.exception(
                "download failed with an internal error model=%s; request the download again", quoted(pull.model)
            )
        else:
            pull.status, pull.stage = "done", None
            log.info("downloaded model=%s", quoted(pull.model))
        finally:
            # After `cancel`, this task is no longer registered, and a new download of the model may be registered.
            if self._tasks.get(pull.model) is asyncio.current_task():
                del self._tasks[pull.model]
            self._ended()

    def _forget(self) -> None:
        """Forget the oldest ended downloads."""
        ended = [model for model in self._pulls if model not in self._tasks]
        for model in ended[: max(0, len(ended) - _MAX_ENDED + 1)]:
            del self._pulls[model]
