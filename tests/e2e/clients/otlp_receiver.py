"""A receiver of OpenTelemetry spans (OTLP over HTTP), as a collector would be."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class ReceivedSpan:
    """One span. `parent` is empty for the first span of a trace. Times are Unix nanoseconds."""

    service: str
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    begun: int
    ended: int
    attributes: dict[str, str | int | float | bool]


@dataclass
class Receiver:
    """The received spans, and the bytes of all requests."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list[ReceivedSpan])
    data: bytes = b""

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def take(self, data: bytes) -> None:
        self.data += data
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            facts = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {pair.key: _value(pair.value) for pair in span.attributes}
                    self.spans.append(
                        ReceivedSpan(
                            facts["service.name"],
                            span.name,
                            span.trace_id,
                            span.span_id,
                            span.parent_span_id,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            attributes,
                        )
                    )


def _value(value: object) -> str | int | float | bool:
    return getattr(value, str(value.WhichOneof("value")))  # type: ignore[attr-defined]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            receiver.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
