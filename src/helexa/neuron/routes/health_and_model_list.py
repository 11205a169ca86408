"""Serve `/health`, `/version`, `/metrics`, `/v1/models`: the node and its models."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Literal, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError
from helexa.core.logs import quoted
from helexa.core.node_reports import DeviceHealth, Health, Loading, ModelInfo
from helexa.http.responses import JsonResponse, readiness
from helexa.neuron.hardware.host_memory import host_memory
from helexa.neuron.hardware.machine_description import build_facts, discover
from helexa.neuron.hardware.nvidia_gpus import device_health
from helexa.neuron.lifecycle.default_models import Activation
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.requests.metrics import TEXT_FORMAT
from helexa.neuron.requests.request_and_run_records import KEPT_SECONDS, UsageRecords

WAIT_SECONDS = 8.0

log = logging.getLogger(__name__)

READING_SECONDS = 5.0


async def version(request: Request) -> Response:
    """Handle `GET /version`: return the versions of helexa, Python, torch and Triton."""
    return JsonResponse(await asyncio.to_thread(build_facts))


async def discovery(request: Request) -> Response:
    """Handle `GET /discovery`: return hardware, limits and the host group."""
    facts = await asyncio.to_thread(discover)
    group = request.app.state.group
    limits = {
        "hosts": None if group is None else group.connected_hosts(),
        "memory_limit_mb": request.app.state.memory_limit_mb,
        "max_prompt_tokens": request.app.state.max_prompt_tokens,
        "max_tensor_parallel": request.app.state.max_tensor_parallel(facts),
    }
    return JsonResponse(facts.model_copy(update=limits).json_dict())


async def health(request: Request) -> Response:
    """Handle `GET /health`: return memory, devices and the load of each model."""
    return JsonResponse(request.app.state.health.report().json_dict())


async def ready(request: Request) -> Response:
    """Handle `GET /health/ready`: status 200 if the node is ready, else 503."""
    # A node is ready if it does not shut down, and has tried to load each of its default models. The response contains
    # no names of models, because the route needs no key.
    state = request.app.state
    loading = state.activation.snapshot().state != "ready"
    return readiness(
        {
            "node": "the node is shutting down" if state.registry.draining else None,
            "models": "the default models are loading" if loading else None,
        }
    )


async def metrics(request: Request) -> Response:
    """Handle `GET /metrics`: return all metrics without waiting for engines."""
    return Response(request.app.state.metrics.text(), headers={"content-type": TEXT_FORMAT})


async def list_models(request: Request) -> Response:
    """Handle `GET /v1/models`: list the models, including sleeping and crashed ones."""
    infos: list[ModelInfo] = request.app.state.registry.infos()
    created = int(time.time())
    return JsonResponse(model_list([model_entry(info, created) for info in infos]))


async def show_model(request: Request) -> Response:
    """Handle `GET /v1/models/{id}`: describe one loaded or sleeping model."""
    model: ServedModel = request.app.state.registry.get(request.path_params["model_id"])
    return JsonResponse(model_entry(model.info(), int(time.time())))


async def get_usage(request: Request) -> Response:
    """Handle `GET /usage/{id}`: return a request's token counts, after it has ended."""
    records: UsageRecords = request.app.state.usage
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            record = await records.find(request.path_params["usage_id"])
    except TimeoutError:
        record = None
    if record is None:
        message = f"no request with this usage id has ended in the last {KEPT_SECONDS:.0f} s; query the usage earlier"
        raise ApiError(404, "usage_not_found", message)
    return JsonResponse(asdict(record))


class LimitEntry(TypedDict):
    """In `/v1/models`: a model's limits of context, input and output, in tokens.

    Unknown limits are absent.
    """

    context: int
    input: NotRequired[int]
    output: NotRequired[int]


class ModelEntry(TypedDict):
    """One model in the list of `/v1/models`.

    `max_model_len` and similar fields repeat `limit`, because some agents read only these fields.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["helexa"]
    loaded: bool
    capabilities: NotRequired[list[str]]
    limit: NotRequired[LimitEntry]
    tool_call: bool
    reasoning: bool
    max_model_len: NotRequired[int]
    max_input_tokens: NotRequired[int]
    max_output_tokens: NotRequired[int]


class ModelList(TypedDict):
    """The body of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelEntry]


def model_entry(info: ModelInfo, created: int) -> ModelEntry:
    """Convert a node's report about a model to an entry of `/v1/models`.

    `created` is in Unix seconds.
    """
    entry = ModelEntry(
        id=info.id,
        object="model",
        created=created,
        owned_by="helexa",
        # Some clients offer only models with `loaded`. A sleeping model counts, because it wakes for a request.
        loaded=info.status in ("loaded", "sleeping"),
        tool_call=info.tool_call,
        reasoning=info.reasoning,
    )
    if info.capabilities:
        entry["capabilities"] = info.capabilities
    if info.limit is not None:
        entry["limit"] = LimitEntry(context=info.limit.context)
        entry["max_model_len"] = info.limit.context
        if info.limit.input is not None:
            entry["limit"]["input"] = entry["max_input_tokens"] = info.limit.input
        if info.limit.output is not None:
            entry["limit"]["output"] = entry["max_output_tokens"] = info.limit.output
    return entry


def model_list(entries: list[ModelEntry]) -> ModelList:
    """Return the body of `GET /v1/models` with the given list entries."""
    return ModelList(object="list", data=entries)


class HealthMonitor:
    """Measures memory and accelerators periodically, and builds reports.

    A report contains the values of the last measurement, because a measurement may block. If a measurement fails or
    returns no memory, the previous values remain in use.
    """

    def __init__(
        self,
        registry: Registry,
        activation: Activation,
        *,
        local_revision: Callable[[], str] | None = None,
        responses: str | None = None,
        memory_limit: int = 0,
        memory: Callable[[], tuple[int, int]] = host_memory,
        devices: Callable[[], list[DeviceHealth]] = device_health,
    ) -> None:
        self._registry = registry
        self._activation = activation
        # function that returns the revision of the list of models on the disks; None if the node reports no such list
        self._local_revision = local_revision
        self._responses = responses  # prefix of the ids of stored responses; None if the node stores no responses
        self._memory_limit = memory_limit
        # function that returns the free and the total bytes of host memory, without blocking
        self._read_memory = memory
        # Function that returns the state of the accelerators. It may block if the driver is busy.
        self._read_devices = devices
        self._memory = (0, 0)
        self._devices: dict[int, DeviceHealth] = {}
        self._begun = time.monotonic()

    def report(self) -> Health:
        """Return the health report with the last measurements. Does not block."""
        free, total = self._memory
        limit = self._memory_limit
        runs_on_cpu = total > 0 and not self._devices
        return Health(
            uptime_secs=int(time.monotonic() - self._begun),
            memory_free_mb=free >> 20 if total else None,
            memory_total_mb=total >> 20 or None,
            grantable_mb=self._registry.memory.available("cpu", free, limit) >> 20 if runs_on_cpu else None,
            devices=[self._with_limit(self._devices[index]) for index in sorted(self._devices)],
            activation=self._activation.snapshot(),
            loading=[
                Loading(model_id=info.id, stage=info.stage, progress=info.progress) for info in self._registry.loading()
            ],
            poisoned=self._registry.poisoned(),
            responses=self._responses,
            local_revision=None if self._local_revision is None else self._local_revision(),
            models=[model.load() for model in self._registry.models()],
        )

    def _with_limit(self, device: DeviceHealth) -> DeviceHealth:
        if not self._memory_limit:
            return device
        free = device.vram_free_mb << 20
        available = self._registry.memory.available(f"cuda:{device.index}", free, self._memory_limit)
        return device.model_copy(update={"grantable_mb": available >> 20})

    async def run(self) -> None:
        """Measure every `READING_SECONDS` until the task is canceled."""
        await asyncio.gather(_repeat(self._take_memory), _repeat(self._take_devices))

    async def _take_memory(self) -> None:
        free, total = self._read_memory()
        if total:
            self._memory = (free, total)
            self._registry.memory.observe(free)

    async def _take_devices(self) -> None:
        read = await asyncio.to_thread(self._read_devices)
        self._devices |= {device.index: device for device in read}


async def _repeat(reading: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await reading()
        except OSError as error:
            log.error("reading memory or devices failed error=%s; the last reading stays in use", quoted(error))
        except Exception:
            log.exception("reading memory or devices failed; the last reading stays in use")
        await asyncio.sleep(READING_SECONDS)


routes = [
    Route("/metrics", metrics),
    Route("/v1/models", list_models),
    Route("/v1/models/{model_id:path}", show_model),
    Route("/usage/{usage_id}", get_usage, methods=["GET"]),
    Route("/version", version),
    Route("/discovery", discovery),
    Route("/health", health),
    Route("/health/ready", ready),
]
