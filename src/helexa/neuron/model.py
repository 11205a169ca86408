"""One loaded model: its text side, its engine, and how busy it is."""

from helexa.core.errors import service_unavailable
from helexa.core.fleet import Limit, ModelInfo, ModelLoad, ModelSpec, ModelStatus, Servable
from helexa.neuron.admission.admission import Admission
from helexa.neuron.config import TorchConfig
from helexa.neuron.engine.client import EngineClient
from helexa.neuron.engine.messages import Timing
from helexa.neuron.text.model_text import ModelText

_EMA_ALPHA = 0.3


class ServedModel:
    """A model that answers requests.

    Attributes:
        id: its bare id, by which requests name it.
        spec: what it was loaded from.
        text: tokenizer and chat template.
        engine: the process that runs it.
        admission: who may use it now.
    """

    def __init__(
        self,
        model_id: str,
        spec: ModelSpec,
        text: ModelText,
        engine: EngineClient,
        config: TorchConfig | None = None,
    ) -> None:
        self.id = model_id
        self.spec = spec
        self.text = text
        self.engine = engine
        self.admission = Admission((config or TorchConfig()).admission, engine)
        self._tok_s_prefill = 0.0
        self._tok_s_decode = 0.0

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.engine.ready.context_length

    def info(self, status: ModelStatus = "loaded") -> ModelInfo:
        """What `GET /models` says of it; reads only what is already known."""
        alive = self.engine.alive
        return ModelInfo(
            id=self.id,
            status=status,
            devices=_device_indices(self.engine.ready.device),
            vram_used_mb=self._vram_mb(),
            quant=self.engine.ready.quant or None,
            capabilities=["text"],
            limit=Limit(context=self.context_length),
            tool_call=self.text.capabilities.tool_call,
            reasoning=self.text.capabilities.reasoning,
            servable=Servable(ok=alive, reason=None if alive else "engine_down"),
        )

    def load(self) -> ModelLoad:
        """What `GET /health` says of it."""
        load, engine = self.admission.load(self.id), self.engine
        load.kv_pages_total, load.kv_pages_free = engine.ready.kv_pages, engine.free_pages
        load.prompt_tokens_total, load.cached_prompt_tokens_total = engine.prompt_tokens, engine.cached_tokens
        load.tok_s_prefill, load.tok_s_decode = round(self._tok_s_prefill, 2), round(self._tok_s_decode, 2)
        return load

    def record(self, timing: Timing, prefill_tokens: int, completion_tokens: int) -> None:
        """Let a finished request count in the rates of tokens per second; cached tokens are no prefill."""
        self._tok_s_prefill = _averaged(self._tok_s_prefill, prefill_tokens, timing.prefill_ms)
        self._tok_s_decode = _averaged(self._tok_s_decode, completion_tokens - 1, timing.decode_ms)

    async def close(self, grace: float = 5.0) -> None:
        """End the engine; its memory is free when this returns. Whoever waited for it is told to ask again."""
        self.admission.close(service_unavailable(f"model '{self.id}' is being unloaded", retry_after=5))
        await self.engine.close(grace)

    def _vram_mb(self) -> int | None:
        ready = self.engine.ready
        return (ready.weight_bytes + ready.kv_bytes) >> 20 if ready.device.startswith("cuda") else None


def _averaged(average: float, tokens: int, milliseconds: float) -> float:
    if tokens <= 0 or milliseconds <= 0:
        return average
    rate = tokens * 1000 / milliseconds
    return rate if average == 0 else average + _EMA_ALPHA * (rate - average)


def _device_indices(device: str) -> list[int]:
    kind, _, index = device.partition(":")
    return [int(index or 0)] if kind == "cuda" else []
