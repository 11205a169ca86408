"""A model of this node and the status of its engine, which is restarted after a crash."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from helexa.core.errors import HelexaError, service_unavailable
from helexa.core.fleet import ModelInfo, ModelSpec, ModelStatus, Servable
from helexa.neuron.config import TorchConfig
from helexa.neuron.engine.ipc.messages import Progress
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.grammar import GrammarChecker
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.lifecycle.recovery import RestartLimiter
from helexa.neuron.text.model_text import ModelText

if TYPE_CHECKING:
    from helexa.neuron.vision.model_vision import ModelVision

log = logging.getLogger(__name__)


class EngineLauncher(Protocol):
    """Function that starts an engine process for one model. Each call uses the same model files and engine options."""

    def __call__(
        self, *, on_progress: Callable[[Progress], None] | None, on_exit: Callable[[str], None]
    ) -> Awaitable[EngineClient]:
        """Start an engine, wait until it has loaded the model, and return a client of the engine.

        Args:
            on_progress: called with the progress of the load.
            on_exit: called with the reason if the engine process exits after the load.
        """
        ...


class HostedModel:
    """A model of this node, with the engine process that runs the model.

    `open` starts the engine, and `close` ends it. If the engine crashes, it is restarted automatically.

    Args:
        model_id: id of the model in requests, without the scheme of its source.
        spec: the load request.
        text: tokenizer and chat template of the model.
        launch: starts an engine process for the model.
        restarts: decides when a crashed engine may be restarted.

    Attributes:
        status: `loading` until `open` has started an engine, `loaded` if the model can serve requests, `recovering`
            while a crashed engine is restarted, or `poisoned` (quarantined) after too many crashes. The engine of a
            quarantined model is not restarted.
        reason: one line that says why the status is `recovering` or `poisoned`; None for other statuses.
        model: object that serves requests. Each start of an engine replaces it.
    """

    model: ServedModel

    def __init__(
        self,
        model_id: str,
        spec: ModelSpec,
        text: ModelText,
        launch: EngineLauncher,
        restarts: RestartLimiter,
        *,
        config: TorchConfig | None = None,
        grammars: GrammarChecker | None = None,
        vision: "ModelVision | None" = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.status: ModelStatus = "loading"
        self.reason: str | None = None
        self._id = model_id
        self._spec = spec
        self._text = text
        self._config = config
        self._grammars = grammars
        self._vision = vision
        self._launch = launch
        self._restarts = restarts
        self._clock = clock
        self._sleep = sleep
        self._recovery: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self, on_progress: Callable[[Progress], None] | None = None) -> ServedModel:
        """Start an engine, wait until it has loaded the model, and return the object that serves requests.

        Raises:
            HelexaError: the engine did not start or could not load the model. The message says why.
        """
        engine = await self._launch(on_progress=on_progress, on_exit=self._on_death)
        self.model = ServedModel(
            self._id, self._spec, self._text, engine, self._config, grammars=self._grammars, vision=self._vision
        )
        self.status, self.reason = "loaded", None
        return self.model

    def info(self) -> ModelInfo:
        """Return the model's entry in `GET /models` without waiting for the engine."""
        info = self.model.info(self.status)
        if self.status != "loaded":
            info.servable = Servable(ok=False, reason=self.status, detail=self.reason)
        if self.status == "poisoned":
            info.vram_used_mb = None
        return info

    def retire(self) -> None:
        """Disable restarts of the engine. From now on, an exit of the engine does not count as a crash."""
        self._closed = True

    async def close(self) -> None:
        """Stop the engine process. If it is being restarted, cancel the restart. Return when its memory is free."""
        self.retire()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        await self.model.close()

    def _on_death(self, reason: str) -> None:
        if self._closed:
            return
        log.error("engine exited model=%s: %s", self._id, reason)
        self.status, self.reason = "recovering", reason
        self.model.admission.close(service_unavailable(f"model '{self._id}' is recovering", retry_after=2))
        self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        """Restart the engine until it loads the model. Quarantine the model if `restarts` allows no further attempt."""
        while (pause := self._restarts.next(self._clock())) is not None:
            await self._sleep(pause)
            try:
                await self.open()
            except (HelexaError, OSError) as error:
                self.reason = str(error)
                log.error("model=%s could not be recovered: %s", self._id, error)
                continue
            except Exception:
                self.reason = "internal error; see the node's log"
                log.exception("model=%s could not be recovered", self._id)
                continue
            log.warning("recovered model=%s", self._id)
            return
        count, window = self._restarts.most, self._restarts.window
        self.reason = f"{count} restarts within {window:.0f} s failed; last error: {self.reason}"
        self.status = "poisoned"
        log.error("quarantined model=%s until it is loaded or unloaded: %s", self._id, self.reason)
