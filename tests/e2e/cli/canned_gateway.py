"""An HTTP server with the gateway's API whose responses a test chooses."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class CannedGateway:
    """Listens on a free local port until closed.

    Attributes:
        chunks: the stream that answers each chat request: a string is a content delta, a dict a raw chunk.
            "WAIT" stalls until the client disconnects; "DROP" closes the connection.
        response_limit: number of chat requests that are answered, None for all; later requests stall like "WAIT".
        error_response: (status, headers, envelope) to send instead of `chunks`.
        drops: number of next GET requests whose connections are closed without an answer.
        key: API key that GET requests need, or None.
        model_answers: (status, headers, body) of `/api/models/load` and `/api/models/unload`, by path.
        on_unload: called for each unload.
        request_received: set when a chat request arrives.
        client_disconnected: set when a client disconnects during "WAIT".
    """

    def __init__(self):
        self.chunks = ["Hello", " there", "!"]
        self.response_limit = None
        self.error_response = None
        self.finish_reason = "stop"
        self.models = [{"id": "cold/model", "loaded": False}, {"id": "warm/model", "loaded": True}]
        self.nodes = []
        self.health = {"status": "ok", "nodes": {"healthy": 1, "total": 1}}
        self.session = {"signed_in": False, "links": True}
        self.readiness = {"ready": True, "components": {}}
        self.requests = []
        self.model_answers = {}
        self.on_unload = lambda: None
        self.authorization = None
        self.key = None
        self.drops = 0
        self.request_received = threading.Event()
        self.client_disconnected = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.gateway = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        gateway = self.server.gateway
        gateway.authorization = self.headers["Authorization"]
        if gateway.drops:
            gateway.drops -= 1
            self.close_connection = True
            return
        bodies = {
            "/v1/models": {"object": "list", "data": gateway.models},
            "/api/nodes": {"nodes": gateway.nodes},
            "/health": gateway.health,
            "/api/session": gateway.session,
            "/health/ready": gateway.readiness,
        }
        if gateway.key is not None and gateway.authorization != f"Bearer {gateway.key}":
            self._json(401, {}, {"error": {"message": "missing API key", "code": "invalid_api_key"}})
            return
        status = 200 if self.path in bodies else 404
        if self.path == "/health/ready" and not gateway.readiness.get("ready", True):
            status = 503
        self._json(status, {}, bodies.get(self.path, {}))

    def do_POST(self):
        gateway = self.server.gateway
        gateway.authorization = self.headers["Authorization"]
        gateway.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        within_limit = gateway.response_limit is None or len(gateway.requests) <= gateway.response_limit
        gateway.request_received.set()
        if gateway.error_response:
            self._json(*gateway.error_response)
            return
        if self.path.startswith("/api/models/"):
            if self.path == "/api/models/unload":
                gateway.on_unload()
            model, node = gateway.requests[-1]["model"], gateway.requests[-1].get("node", "beast")
            self._json(*gateway.model_answers.get(self.path, (200, {}, {"model": model, "node": node})))
            return
        if self.path == "/v1/embeddings":
            texts = gateway.requests[-1]["input"]
            data = [{"index": index, "embedding": [index + 0.0, 2.0]} for index in range(len(texts))]
            self._json(200, {}, {"data": data[::-1]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # the client may disconnect at any time
            self._stream_response(gateway.chunks if within_limit else ["WAIT"])

    def _stream_response(self, chunks):
        self._write(b": keep-alive\n\n")
        self._delta({"role": "assistant", "content": ""})
        for chunk in chunks:
            if chunk == "WAIT":
                self._wait_for_disconnect()
                return
            if chunk == "DROP":
                self.close_connection = True
                return
            self._event(chunk) if isinstance(chunk, dict) else self._delta({"content": chunk})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.server.gateway.finish_reason}]})
        usage = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
        self._event({"choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _delta(self, delta):
        self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def _event(self, chunk):
        self._write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _write(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _wait_for_disconnect(self):
        self.close_connection = True
        self.connection.settimeout(60)
        if self.connection.recv(1) == b"":
            self.server.gateway.client_disconnected.set()

    def _json(self, status, headers, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
