"""Load the default models at the start of a node, with retries."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from helexa.core import node_reports
from helexa.core.errors import HelexaError, SourceError
from helexa.core.logs import quoted
from helexa.core.model_source_ids import bare_id
from helexa.core.node_reports import FailedLoad, ModelSpec
from helexa.neuron.lifecycle.registry import AlreadyLoadedError, Registry

log = logging.getLogger(__name__)

ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 300.0


class Activation:
    """Loads the default models one after another.

    A model whose download fails with an error that may be transient stays pending. After one attempt for each model,
    the node waits and then retries the pending models. The node makes at most `ATTEMPTS` attempts per model. A load
    that fails for another reason is not retried.
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
        self._state = node_reports.Activation(state="pre_warming" if specs else "ready")
        registry.awaited |= self._waiting.keys()

    def snapshot(self) -> node_reports.Activation:
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
            names = quoted(", ".join(self._waiting))
            log.warning(
                "downloads of default models failed and are tried again models=%s retry_secs=%.0f", names, pause
            )
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
            log.error("loading of the default model failed model=%s error=%s", quoted(model_id), quoted(error))
            if last or error.kind != "repo_fetch_failed":
                self._settle(model_id, str(error))
        except HelexaError as error:
            fields = (quoted(model_id), quoted(error))
            log.error("loading of the default model failed model=%s error=%s; request the load again", *fields)
            self._settle(model_id, str(error))
        except Exception:
            log.exception("loading of the default model failed model=%s; request the load again", quoted(model_id))
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
