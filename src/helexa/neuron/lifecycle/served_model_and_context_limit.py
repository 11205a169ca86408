"""A loaded model that serves requests, and its context limit."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from helexa.core.display import memory_text
from helexa.core.errors import service_unavailable
from helexa.core.load_options import LoadOptions
from helexa.neuron.admission import Admission
from helexa.neuron.engine.ipc.messages import Ready, Timing
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.grammar import GrammarChecker
from helexa.neuron.options import ContextLimitOptions, TorchOptions
from helexa.neuron.text.model_text import ModelText

if TYPE_CHECKING:
    from helexa.core.node_reports import ModelInfo, ModelLoad, ModelStatus, Servable
    from helexa.neuron.vision.model_vision import ModelVision


_EMA_ALPHA = 0.3
_MIN_MEASURED_TOKENS = 256  # shorter prompts are not measured: their prefill rate differs from that of long prompts

LEAST_BY_RATE = 4096  # the prefill rate never lowers the context limit below this number of tokens

HOLD_SECONDS = 600.0

_STEP = 1024  # context limits above this number of tokens are rounded down to a multiple of this number
_OUTPUT_PART = 4  # at most a quarter of the context is reserved for the output
# For each total in `ModelLoad`, the counter of an engine. The total is the sum over all engines of the model so far.
_TOTALS = {
    "prompt_tokens_total": "prompt_tokens",
    "cached_prompt_tokens_total": "cached_tokens",
    "cached_prompts_total": "cached_prompts",
    "disk_prompt_tokens_total": "disk.tokens",
    "disk_prompts_total": "disk.prompts",
    "disk_read_bytes_total": "disk.read_bytes",
    "disk_read_ms_total": "disk.read_ms",
    "encoded_images_total": "encoded_images",
    "reused_images_total": "reused_images",
    "ngram_drafts_total": "drafts.ngram",
    "accepted_ngram_drafts_total": "drafts.accepted_ngram",
    "model_drafts_total": "drafts.model",
    "accepted_model_drafts_total": "drafts.accepted_model",
}
# default prefill time limit in seconds, and assumed prompt tokens per second before a measurement
_CPU = (600.0, 100.0)
_ACCELERATOR = (120.0, 800.0)


@dataclass(frozen=True)
class EngineProperties:
    """Fixed properties of an engine that limit a model's context length."""

    # largest number of tokens in a sequence: the smallest of the trained context length, the configured length and the
    # size of the KV cache
    context: int
    pages: int
    page_size: int
    page_bytes: int
    cpu: bool  # whether the engine runs on a CPU


@dataclass(frozen=True)
class Measurements:
    """Current measurements that limit a served model's context length."""

    missing_bytes: int = 0  # bytes of memory that the node has granted to the engine but other programs use
    tok_s_prefill: float = 0.0  # measured prefill rate in prompt tokens per second; 0 before the first measurement


class TokenLimits(NamedTuple):
    """Maximum numbers of tokens of a served model's request.

    `helexa.core.node_reports.Limit` has the same fields, but its import loads pydantic, which is slow.
    """

    context: int  # 0 if there is no memory for any request
    input: int  # tokens of the prompt: `context` minus `output`
    output: int


def context_limit(engine: EngineProperties, measurements: Measurements, settings: ContextLimitOptions) -> TokenLimits:
    """Return the current limits of a served model's requests.

    The limit of the context is the smallest of these numbers: the tokens that the engine supports, the tokens that fit
    in the free KV cache memory, the configured maximum and, if `settings.enabled`, the tokens prefilled in time. Above
    `_STEP` tokens, it is rounded down to a multiple of `_STEP`.
    """
    context = min(engine.context, _cached_positions(engine, measurements.missing_bytes))
    if settings.enabled:
        context = min(context, _rate_ceiling(engine, measurements, settings))
    context = min(context, settings.max_prompt_tokens or context)
    if context > _STEP:
        context -= context % _STEP
    output = min(settings.output_reserve_tokens, context // _OUTPUT_PART)
    return TokenLimits(context, context - output, output)


def _rate_ceiling(engine: EngineProperties, measurements: Measurements, settings: ContextLimitOptions) -> int:
    """Return how many tokens a model can prefill in time, at least `LEAST_BY_RATE`."""
    seconds = settings.target_prefill_latency_secs or (_CPU if engine.cpu else _ACCELERATOR)[0]
    return max(int(seconds * (measurements.tok_s_prefill or _first_rate(engine, settings))), LEAST_BY_RATE)


def _first_rate(engine: EngineProperties, settings: ContextLimitOptions) -> float:
    """Return the assumed prefill rate in tokens/s until a model's rate is measured."""
    return settings.bootstrap_prefill_tok_per_sec or (_CPU if engine.cpu else _ACCELERATOR)[1]


class SteadyRate:
    """Smooths a served model's prefill rate, so that limits change seldom.

    The rate rises to a higher measurement at once. If all measurements of `HOLD_SECONDS` are lower than the rate, the
    rate falls to the highest of these measurements.
    """

    def __init__(self, first: float, clock: Callable[[], float]) -> None:
        self.rate = first
        self._clock = clock
        self._lower = 0.0  # highest measurement since `_since`
        self._since: float | None = None

    def measure(self, rate: float) -> None:
        """Add the measurement `rate`, in tokens per second, and update the smoothed rate."""
        if rate >= self.rate:
            self.rate, self._since = rate, None
        elif self._since is None:
            self._lower, self._since = rate, self._clock()
        else:
            self._lower = max(self._lower, rate)
            if self._clock() - self._since >= HOLD_SECONDS:
                self.rate, self._since = self._lower, None


def _cached_positions(engine: EngineProperties, missing_bytes: int) -> int:
    """Return how many tokens fit in the KV pages whose memory is free.

    Args:
        missing_bytes: bytes of the KV cache's memory that other programs use.
    """
    missing_pages = -(-missing_bytes // max(engine.page_bytes, 1))
    return max(engine.pages - missing_pages, 0) * engine.page_size


class ServedModel:
    """A loaded model that serves requests."""

    def __init__(
        self,
        model_id: str,
        spec: LoadOptions,
        text: ModelText,
        engine: EngineClient,
        config: TorchOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarChecker | None = None,
        vision: "ModelVision | None" = None,
    ) -> None:
        config = config or TorchOptions()
        self.id = model_id
        self.spec = spec
        self.text = text
        self.engine = engine
        self.admission = Admission(config.admission, engine)
        self.grammars = grammars or GrammarChecker()
        self.vision = vision if engine.ready.images else None
        self._engine_properties = _engine_properties(engine.ready)
        self._context_limit = config.context_limit
        self._steady_rate = SteadyRate(_first_rate(self._engine_properties, config.context_limit), clock)
        self._tok_s_prefill = 0.0
        self._tok_s_decode = 0.0
        self._expect_request: Callable[[], None] = lambda: None
        self._wait_until_awake: Callable[[], Awaitable[None]] | None = None
        self._earlier_totals = dict.fromkeys(_TOTALS, 0)  # sums over the model's engines before the current one

    def set_wake(self, expect_request: Callable[[], None], wait_until_awake: Callable[[], Awaitable[None]]) -> None:
        """Set the functions that the methods `expect_request` and `wake` call."""
        self._expect_request, self._wait_until_awake = expect_request, wait_until_awake

    def expect_request(self) -> None:
        """Begin to wake the model, if it sleeps, while its next request is prepared."""
        self._expect_request()

    async def wake(self) -> None:
        """Wait until the model is awake, if it sleeps.

        After this call, the caller must get its request admitted before it awaits anything else. Otherwise, the model
        may fall asleep again.

        Raises:
            ApiError: status 503: the model could not wake, or it is being unloaded.
        """
        if self._wait_until_awake is not None:
            await self._wait_until_awake()

    def replace_engine(self, engine: EngineClient) -> None:
        """Serve later requests with `engine`, after the former engine has ended."""
        self._earlier_totals = self._totals()
        self.engine = engine
        self._engine_properties = _engine_properties(engine.ready)
        self.admission.replace_engine(engine)

    def _totals(self) -> dict[str, int]:
        earlier = self._earlier_totals
        return {field: earlier[field] + attrgetter(counter)(self.engine) for field, counter in _TOTALS.items()}

    @property
    def context_length(self) -> int:
        """Current limit of prompt and output together, in tokens."""
        return self.limit.context

    @property
    def default_output(self) -> int:
        """Default output limit of requests, in tokens; 0: only the context is a limit."""
        return self._context_limit.default_output_tokens

    @property
    def limit(self) -> TokenLimits:
        """Current limits of a request's prompt and output, in tokens."""
        measurements = Measurements(self.engine.missing_bytes, self._steady_rate.rate)
        return context_limit(self._engine_properties, measurements, self._context_limit)

    @property
    def servable(self) -> "Servable":
        """Whether the model could serve a small request now, and if not, why."""
        from helexa.core.node_reports import Servable

        reason, detail = self._why_unservable() or (None, None)
        return Servable(ok=reason is None, reason=reason, detail=detail)

    def require_servable(self) -> None:
        """Raise an `ApiError` (503) if the model cannot serve any request now."""
        if (why := self._why_unservable()) is not None:
            message = f"model '{self.id}' cannot serve requests now: {why[1]}; retry in 5 s"
            raise service_unavailable(message, retry_after=5)

    def _why_unservable(self) -> tuple[str, str] | None:
        """Return a reason code and a text if the model can serve no request now, or None."""
        if not self.engine.alive:
            return "engine_down", "the model's engine is not running"
        if self.limit.context == 0:
            missing = memory_text(self.engine.missing_bytes >> 20)
            return (
                "insufficient_memory",
                f"{missing} of the memory granted to the KV cache are in use by other programs",
            )
        return None

    def info(self, status: "ModelStatus" = "loaded") -> "ModelInfo":
        """Return the model's entry in `GET /models` without waiting for the engine."""
        from helexa.core.node_reports import Limit, ModelInfo

        return ModelInfo(
            id=self.id,
            status=status,
            devices=_device_indices(self.engine.options.devices or [self.engine.ready.device]),
            vram_used_mb=(self.engine.ready.weight_bytes + self.engine.ready.kv_bytes) >> 20,
            granted_mb=self._granted_mb(),
            architecture=self.engine.ready.model_type,
            quant=self.engine.ready.quant or None,
            tensor_parallel=ranks if (ranks := self.engine.options.tensor_parallel) > 1 else None,
            pipeline_parallel=hosts if (hosts := self.engine.options.pipeline_parallel) > 1 else None,
            capabilities=["text"] if self.vision is None else ["text", "vision"],
            limit=Limit(**self.limit._asdict()),
            tool_call=self.text.capabilities.tool_call,
            reasoning=self.text.capabilities.reasoning,
            servable=self.servable,
        )

    def load(self) -> "ModelLoad":
        """Return the model's `GET /health` entry: requests, KV memory and token rates."""
        load, engine = self.admission.load(self.id), self.engine
        load.kv_pages_total, load.kv_pages_free = engine.ready.kv_pages, engine.free_pages
        for field, total in self._totals().items():
            setattr(load, field, total)
        memory, disk = engine.prefixes.memory, engine.prefixes.disk
        if engine.alive:
            load.memory_prefixes, load.disk_prefixes = frozenset(memory), frozenset(disk)
        elif engine.options.prefix_disk_mb:  # before its end, the engine saved the prefixes in memory to disk
            load.disk_prefixes = frozenset([*memory, *disk])
        load.saved_prompts_mb = -(-engine.disk.size >> 20)
        load.draft_gain = round(engine.drafts.gain, 3)
        load.tok_s_prefill, load.tok_s_decode = round(self._tok_s_prefill, 2), round(self._tok_s_decode, 2)
        return load

    def record(self, timing: Timing, prefill_tokens: int, completion_tokens: int) -> None:
        """Update the prefill and decode rates with a finished request's timing.

        Args:
            prefill_tokens: number of computed prompt tokens, without the tokens that were found in the prefix cache.
        """
        self._tok_s_prefill = _averaged(self._tok_s_prefill, prefill_tokens, timing.prefill_ms)
        if timing.read_tokens >= _MIN_MEASURED_TOKENS and timing.read_ms > 0:
            self._steady_rate.measure(timing.read_tokens * 1000 / timing.read_ms)
        self._tok_s_decode = _averaged(self._tok_s_decode, completion_tokens - 1, timing.decode_ms)

    def reject_requests(self) -> None:
        """Reject waiting and later requests with a 503."""
        self.admission.close(service_unavailable(f"model '{self.id}' is being unloaded; retry in 5 s", retry_after=5))

    async def close(self, grace: float = 5.0, save_secs: float = 2.0) -> None:
        """Reject waiting and later requests with a 503, and stop the engine process.

        Args:
            grace: seconds that the engine process has to exit before it is killed.
            save_secs: longest time for saving the prefix cache to disk, less than `grace`.
        """
        self.reject_requests()
        await self.engine.close(grace, save_secs)

    def _granted_mb(self) -> int | None:
        limited = self.engine.options.memory_limit_mb or not self.engine.ready.device.startswith("cuda")
        return self.engine.granted_bytes >> 20 if limited else None


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
