"""A loaded model that serves requests: its tokenizer, output formats, engine, admission control and token limits."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from helexa.core.errors import service_unavailable
from helexa.core.fleet import Limit, ModelInfo, ModelLoad, ModelSpec, ModelStatus, Servable
from helexa.neuron.admission.admission import Admission
from helexa.neuron.config import TorchConfig
from helexa.neuron.engine.ipc.messages import Ready, Timing
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.grammar import GrammarChecker
from helexa.neuron.lifecycle.context_limit import EngineProperties, Measurements, SteadyRate, context_limit, first_rate
from helexa.neuron.text.model_text import ModelText

if TYPE_CHECKING:
    from helexa.neuron.vision.model_vision import ModelVision

_EMA_ALPHA = 0.3
_MIN_MEASURED_TOKENS = 256  # the prefill rate of shorter prompts is not that of long prompts


class ServedModel:
    """A loaded model that serves requests.

    Attributes:
        id: id of the model in requests, without the scheme of its source.
        spec: the load request.
        text: tokenizer, chat template and output formats.
        engine: client of the engine process that runs the model.
        admission: admission control, which limits the requests in the engine.
        grammars: checks whether grammars for constrained output compile.
        vision: prepares images for the model; None if the model reads text only.
    """

    def __init__(
        self,
        model_id: str,
        spec: ModelSpec,
        text: ModelText,
        engine: EngineClient,
        config: TorchConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarChecker | None = None,
        vision: "ModelVision | None" = None,
    ) -> None:
        config = config or TorchConfig()
        self.id = model_id
        self.spec = spec
        self.text = text
        self.engine = engine
        self.admission = Admission(config.admission, engine)
        self.grammars = grammars or GrammarChecker()
        self.vision = vision if engine.ready.images else None
        self._engine_properties = _engine_properties(engine.ready)
        self._context_limit = config.context_limit
        self._steady_rate = SteadyRate(first_rate(self._engine_properties, config.context_limit), clock)
        self._tok_s_prefill = 0.0
        self._tok_s_decode = 0.0

    @property
    def context_length(self) -> int:
        """Largest number of tokens that a prompt and its output may have together at this moment."""
        return self.limit.context

    @property
    def default_output(self) -> int:
        """Output limit, in tokens, of requests that set no limit. 0: only the context length limits the output."""
        return self._context_limit.default_output_tokens

    @property
    def limit(self) -> Limit:
        """The current limits of a request's prompt and output, in tokens. Does not wait for the engine."""
        measurements = Measurements(self.engine.missing_bytes, self._steady_rate.rate)
        return context_limit(self._engine_properties, measurements, self._context_limit)

    @property
    def servable(self) -> Servable:
        """Whether the model could serve at least a small request now, and if not, why. Does not wait for the engine."""
        if not self.engine.alive:
            return Servable(ok=False, reason="engine_down", detail="the model's engine is not running")
        if self.limit.context == 0:
            missing = self.engine.missing_bytes >> 20
            detail = f"{missing} MiB of the memory granted to the KV cache are in use by other programs"
            return Servable(ok=False, reason="insufficient_memory", detail=detail)
        return Servable(ok=True)

    def require_servable(self) -> None:
        """Raise an error if the model cannot serve any request now.

        Raises:
            ApiError: status 503: the engine is not running, or other programs use the memory of its KV cache.
        """
        servable = self.servable
        if not servable.ok:
            raise service_unavailable(f"model '{self.id}' cannot serve requests now: {servable.detail}", retry_after=5)

    def info(self, status: ModelStatus = "loaded") -> ModelInfo:
        """Return the model's entry in `GET /models` without waiting for the engine."""
        return ModelInfo(
            id=self.id,
            status=status,
            devices=_device_indices(self.engine.options.devices or [self.engine.ready.device]),
            vram_used_mb=self._vram_mb(),
            quant=self.engine.ready.quant or None,
            tensor_parallel=ranks if (ranks := self.engine.options.tensor_parallel) > 1 else None,
            pipeline_parallel=hosts if (hosts := self.engine.options.pipeline_parallel) > 1 else None,
            capabilities=["text"] if self.vision is None else ["text", "vision"],
            limit=self.limit,
            tool_call=self.text.capabilities.tool_call,
            reasoning=self.text.capabilities.reasoning,
            servable=self.servable,
        )

    def load(self) -> ModelLoad:
        """Return the model's entry in `GET /health`: requests, KV cache memory and measured token rates."""
        load, engine = self.admission.load(self.id), self.engine
        load.kv_pages_total, load.kv_pages_free = engine.ready.kv_pages, engine.free_pages
        load.prompt_tokens_total, load.cached_prompt_tokens_total = engine.prompt_tokens, engine.cached_tokens
        load.encoded_images_total, load.reused_images_total = engine.encoded_images, engine.reused_images
        load.tok_s_prefill, load.tok_s_decode = round(self._tok_s_prefill, 2), round(self._tok_s_decode, 2)
        return load

    def record(self, timing: Timing, prefill_tokens: int, completion_tokens: int) -> None:
        """Update the measured prefill and decode rates with the timing of a finished request.

        Args:
            timing: durations that the engine measured.
            prefill_tokens: number of prompt tokens that were computed, without those found in the prefix cache.
            completion_tokens: number of generated tokens.
        """
        self._tok_s_prefill = _averaged(self._tok_s_prefill, prefill_tokens, timing.prefill_ms)
        if timing.read_tokens >= _MIN_MEASURED_TOKENS and timing.read_ms > 0:
            self._steady_rate.measure(timing.read_tokens * 1000 / timing.read_ms)
        self._tok_s_decode = _averaged(self._tok_s_decode, completion_tokens - 1, timing.decode_ms)

    async def close(self, grace: float = 5.0) -> None:
        """Reject waiting and later requests with a 503, and stop the engine process.

        The engine's memory is free when this method returns.

        Args:
            grace: seconds that the engine process has to exit before it is killed.
        """
        self.admission.close(service_unavailable(f"model '{self.id}' is being unloaded", retry_after=5))
        await self.engine.close(grace)

    def _vram_mb(self) -> int | None:
        ready = self.engine.ready
        return (ready.weight_bytes + ready.kv_bytes) >> 20 if ready.device.startswith("cuda") else None


def _engine_properties(ready: Ready) -> EngineProperties:
    page_bytes = ready.kv_bytes // max(ready.kv_pages, 1)
    return EngineProperties(
        ready.context_length, ready.kv_pages, ready.page_size, page_bytes, cpu=ready.device == "cpu"
    )


def _averaged(average: float, tokens: int, milliseconds: float) -> float:
    if tokens <= 0 or milliseconds <= 0:
        return average
    rate = tokens * 1000 / milliseconds
    return rate if average == 0 else average + _EMA_ALPHA * (rate - average)


def _device_indices(devices: list[str]) -> list[int]:
    return [int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")]
