"""OpenTelemetry traces of requests, exported with OTLP over HTTP.

Needs the extra `otel`.

Tracing is on if OpenTelemetry's variable `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set.
OpenTelemetry's other variables, such as `OTEL_TRACES_SAMPLER`, apply as well. Without tracing, all functions of this
module do nothing, and OpenTelemetry is not imported.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helexa.core.errors import ConfigError
from helexa.core.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Headers = Iterable[tuple[bytes, bytes]]
Attributes = Mapping[str, str | int | float | bool | None]

# Headers with which a client names the trace of its request.
CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate", b"baggage"})

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_FLUSH_SECS = 3.0


@dataclass
class _State:
    """The provider and the tracer of this process; None without tracing."""

    provider: "TracerProvider | None" = None
    tracer: "Tracer | None" = None


_state = _State()


def configure(service: str, environ: Mapping[str, str] = os.environ) -> None:
    """Switch tracing on, if an endpoint variable is set, but not `OTEL_SDK_DISABLED`.

    `service` is the default of `OTEL_SERVICE_NAME`.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """
    wanted = any(environ.get(name) for name in _ENDPOINTS)
    if not wanted or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            f"{' or '.join(_ENDPOINTS)} is set, but OpenTelemetry is not installed; run "
            "`pip install 'helexa[otel]'`, or unset the variable"
        ) from None
    name = environ.get("OTEL_SERVICE_NAME") or service
    resource = Resource.create({"service.name": name, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _state.provider, _state.tracer = provider, provider.get_tracer("helexa", __version__)


def shut_down() -> None:
    """Switch tracing off; wait at most `_FLUSH_SECS` seconds for the export of spans."""
    if _state.provider is not None:
        thread = threading.Thread(target=_state.provider.shutdown, daemon=True)
        thread.start()
        thread.join(_FLUSH_SECS)
    _state.provider = _state.tracer = None


def server_span(name: str, headers: Headers = ()) -> "Span | None":
    """Begin and return the span of a received request. Return None without tracing.

    If `headers` contain a trace context (`traceparent`), the span continues this trace. The caller must end the span
    with `end_server_span`.
    """
    if _state.tracer is None:
        return None
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers if key in CONTEXT_HEADERS}
    parent = TraceContextTextMapPropagator().extract(carrier)
    return _state.tracer.start_span(name, parent, SpanKind.SERVER)


def client_span(
    parent: "Span | None", name: str, attributes: Attributes
) -> AbstractContextManager[list[tuple[bytes, bytes]]]:
    """Return a context manager that measures a request to another server.

    The context manager yields the headers with which the other server continues the trace. Without tracing or without
    `parent`, it yields no headers.
    """
    return (
        nullcontext([])
        if _state.tracer is None or parent is None
        else _client_span(_state.tracer, parent, name, attributes)
    )


@contextmanager
def _client_span(
    tracer: "Tracer", parent: "Span", name: str, attributes: Attributes
) -> Iterator[list[tuple[bytes, bytes]]]:
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    span = tracer.start_span(name, set_span_in_context(parent), SpanKind.CLIENT, _present(attributes))
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    try:
        yield [(key.encode(), value.encode()) for key, value in carrier.items()]
    except BaseException as error:
        span.set_status(StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        span.end()


def child_span(
    parent: "Span | None", name: str, begun: float, ended: float, attributes: Attributes | None = None
) -> "Span | None":
    """Add a finished span below `parent`, and return the new span.

    `parent` may have ended. Without tracing or without `parent`, return None.

    Args:
        begun, ended: times in seconds of `time.perf_counter`.
        attributes: the span's attributes. None values are omitted.
    """
    if _state.tracer is None or parent is None:
        return None
    from opentelemetry.trace import set_span_in_context

    offset = time.time_ns() - int(time.perf_counter() * 1e9)
    start = int(begun * 1e9) + offset
    span = _state.tracer.start_span(
        name, set_span_in_context(parent), attributes=_present(attributes or {}), start_time=start
    )
    span.end(max(start, int(ended * 1e9) + offset))
    return span


def end_server_span(span: "Span | None", status: int, attributes: Attributes) -> None:
    """End the span of a received request, or do nothing without tracing.

    Attributes with the value None are omitted. A `status` of 500 or more counts as failed.
    """
    if span is None:
        return
    from opentelemetry.trace import StatusCode

    span.set_attributes({"http.response.status_code": status, **_present(attributes)})
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    span.end()


def _present(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
