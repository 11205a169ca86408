"""Prometheus metrics, in a registry of their own. Labels are bounded: known models, configured nodes, known keys."""

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.cortex.exchange import Exchange

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_PLACE = ("model", "node")
_PAYER = ("account", "key")
_DURATION = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
_FIRST_TOKEN = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
_RATE = (1, 2.5, 5, 10, 15, 20, 30, 40, 60, 80, 120, 200)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)

disable_created_metrics()  # one more series per counter and histogram that no dashboard reads


class _Place:
    """All metrics bound to one (model, node)."""

    def __init__(self, metrics: "Metrics", model: str, node: str) -> None:
        self.requests = metrics.requests.labels(model, node)
        self.errors = metrics.errors.labels(model, node)
        self.cold_starts = metrics.cold_starts.labels(model, node)
        self.evictions = metrics.evictions.labels(model, node)
        self.duration = metrics.duration.labels(model, node)
        self.first_token = metrics.first_token.labels(model, node)
        self.rate = metrics.rate.labels(model, node)
        self.prompt = metrics.prompt.labels(model, node)
        self.completion = metrics.completion.labels(model, node)
        self.cached = metrics.cached.labels(model, node)
        self.images = metrics.images.labels(model, node)


class _Payer:
    """All metrics bound to one (account, key)."""

    def __init__(self, metrics: "Metrics", account: str, key: str) -> None:
        self.tokens = metrics.spend.labels(account, key)
        self.prompt = metrics.spend_prompt.labels(account, key)
        self.completion = metrics.spend_completion.labels(account, key)


class Metrics:
    """What the gateway counts."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = _PLACE) -> Counter:
            return Counter(f"cortex_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = _PLACE) -> Histogram:
            return Histogram(f"cortex_{name}", text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests, however they ended")
        self.errors = counter("request_errors", "Requests refused, or failed on the node's side")
        self.cold_starts = counter("cold_starts", "Models loaded because a request asked for them")
        self.evictions = counter("evictions", "Models unloaded by the gateway")
        self.duration = histogram("request_duration_seconds", "From request to the end of the answer", _DURATION)
        self.first_token = histogram("time_to_first_token_seconds", "To the first content of a stream", _FIRST_TOKEN)
        self.rate = histogram("tokens_per_second", "Completion tokens per second", _RATE)
        self.prompt = counter("prompt_tokens", "Prompt tokens, as nodes report them")
        self.completion = counter("completion_tokens", "Completion tokens, as nodes report them")
        self.cached = counter("cached_prompt_tokens", "Prompt tokens served from a node's cache")
        self.images = counter("images_requests", "Requests for images")
        self.spend = counter("spend_tokens", "Tokens billed", _PAYER)
        self.spend_prompt = counter("spend_prompt_tokens", "Prompt tokens billed", _PAYER)
        self.spend_completion = counter("spend_completion_tokens", "Completion tokens billed", _PAYER)
        self.overhead = histogram(
            "gateway_overhead_seconds",
            "From request to asking the node, without waiting for loads and request bodies",
            _OVERHEAD,
            (),
        )
        self._places: dict[tuple[str, str], _Place] = {}
        self._payers: dict[tuple[str, str], _Payer] = {}

    def observe(self, exchange: Exchange) -> None:
        """Count one ended exchange."""
        place = self._place(exchange.model, exchange.node)
        place.requests.inc()
        place.duration.observe(exchange.duration)
        if exchange.failed:
            place.errors.inc()
        if exchange.api == "/v1/images/generations":
            place.images.inc()
        if exchange.overhead is not None:
            self.overhead.observe(exchange.overhead)
        if (first_token := exchange.time_to_first_token) is not None:
            place.first_token.observe(first_token)
        if (rate := exchange.tokens_per_second) is not None:
            place.rate.observe(rate)
        if exchange.usage is not None:
            place.prompt.inc(exchange.usage.prompt)
            place.completion.inc(exchange.usage.completion)
            place.cached.inc(exchange.usage.cached)
            if exchange.principal is not None:
                payer = self._payer(exchange.principal.account_id, exchange.principal.key_id)
                payer.tokens.inc(exchange.usage.prompt + exchange.usage.completion)
                payer.prompt.inc(exchange.usage.prompt)
                payer.completion.inc(exchange.usage.completion)

    def cold_start(self, model: str, node: str) -> None:
        """Count one load that succeeded."""
        self._place(model, node).cold_starts.inc()

    def eviction(self, model: str, node: str) -> None:
        """Count one unload that succeeded."""
        self._place(model, node).evictions.inc()

    def watch(self, collector: Collector) -> None:
        """Ask `collector` too, at every scrape."""
        self.registry.register(collector)

    def text(self) -> bytes:
        """The Prometheus text exposition."""
        return generate_latest(self.registry)

    def _place(self, model: str, node: str) -> _Place:
        place = self._places.get((model, node))
        if place is None:
            place = self._places[model, node] = _Place(self, model, node)
        return place

    def _payer(self, account: str, key: str) -> _Payer:
        payer = self._payers.get((account, key))
        if payer is None:
            payer = self._payers[account, key] = _Payer(self, account, key)
        return payer


def create_metrics_app(metrics: Metrics) -> Starlette:
    """The second listener: `GET /metrics`."""

    async def scrape(_request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": _TEXT_FORMAT})

    return Starlette(routes=[Route("/metrics", scrape)])
