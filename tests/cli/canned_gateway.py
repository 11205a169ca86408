"""A real HTTP server that speaks the gateway's surface with answers a test chooses."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class CannedGateway:
    """Answers on a free port of this machine until closed.

    `pieces` is streamed as the answer to every chat request, a dict among them as a raw chunk; after the piece
    "WAIT" nothing more comes until the client goes away, which sets `gone`; after "DROP" the connection ends.
    `asked` is set once a chat request has arrived.
    `patience` is how many chat requests are answered, None for all; the others wait like "WAIT".
    `refusal` is (status, headers, envelope) instead of an answer.
    """

    def __init__(self):
        self.pieces = ["Hello", " there", "!"]
        self.patience = None
        self.refusal = None
        self.finish_reason = "stop"
        self.models = [{"id": "cold/model", "loaded": False}, {"id": "warm/model", "loaded": True}]
        self.nodes = []
        self.health = {"status": "ok", "nodes": {"healthy": 1, "total": 1}}
        self.requests = []
        self.authorization = None
        self.asked = threading.Event()
        self.gone = threading.Event()
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
        replies = {
            "/v1/models": {"object": "list", "data": gateway.models},
            "/api/nodes": {"nodes": gateway.nodes},
            "/health": gateway.health,
        }
        self._json(200 if self.path in replies else 404, {}, replies.get(self.path, {}))

    def do_POST(self):
        gateway = self.server.gateway
        gateway.authorization = self.headers["Authorization"]
        gateway.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        patient = gateway.patience is None or len(gateway.requests) <= gateway.patience
        gateway.asked.set()
        if gateway.refusal:
            self._json(*gateway.refusal)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # the client may leave whenever it likes
            self._answer(gateway.pieces if patient else ["WAIT"])

    def _answer(self, pieces):
        self._write(b": keep-alive\n\n")
        self._delta({"role": "assistant", "content": ""})
        for piece in pieces:
            if piece == "WAIT":
                self._wait_for_the_end()
                return
            if piece == "DROP":
                self.close_connection = True
                return
            self._event(piece) if isinstance(piece, dict) else self._delta({"content": piece})
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

    def _wait_for_the_end(self):
        self.close_connection = True
        self.connection.settimeout(60)
        if self.connection.recv(1) == b"":
            self.server.gateway.gone.set()

    def _json(self, status, headers, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
