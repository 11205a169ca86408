"""A proxy between a coding agent and the gateway, which records requests and changes them for small models.

A model with half a billion parameters rarely calls the right tool, and rarely ends its response. If the proxy has the
name of a tool (`tool`), it therefore changes the agent's requests. A request without a tool result must call this tool.
A request with a tool result may not call tools, and its response is restricted to one word. The agent then always makes
the same sequence of requests.
"""

import http.client
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_FORCED = {
    "/v1/chat/completions": lambda name: {"type": "function", "function": {"name": name}},
    "/v1/responses": lambda name: {"type": "function", "name": name},
    "/v1/messages": lambda name: {"type": "tool", "name": name},
}
_ONE_WORD = {"type": "string", "enum": ["done"]}
_LENGTH = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_UNSENT = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")


@dataclass
class RecordedRequest:
    """A recorded generation request of the agent: its path, the body that the agent sent, and the response."""

    path: str
    body: dict[str, Any]
    status: int = 0
    answer: bytes = b""

    @property
    def has_result(self) -> bool:
        """True if the request contains a tool result."""
        messages = self.body.get("messages") or self.body.get("input") or []
        return any(_is_result(message) for message in messages if isinstance(message, dict))


@dataclass
class Proxy:
    """A running HTTP server that forwards an agent's requests to the gateway (see the module's docstring).

    Attributes:
        target: base URL of the gateway.
        tool: name of the tool that the model must call, or None to leave tool calls unchanged.
        max_tokens: maximum number of tokens of each response.
        requests: recorded generation requests of the agent, oldest first.
        url: base URL of the proxy.
    """

    target: str
    tool: str | None = None
    max_tokens: int = 200
    requests: list[RecordedRequest] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> "Proxy":
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def changed(self, path: str, request: RecordedRequest) -> dict[str, Any]:
        """Return the request body that the proxy sends to the gateway in place of the agent's body."""
        body = dict(request.body)
        for name in _LENGTH:
            if body.get(name):
                body[name] = min(body[name], self.max_tokens)
        if not any(body.get(name) for name in _LENGTH):
            body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = self.max_tokens
        if self.tool and body.get("tools"):
            if request.has_result:
                _end(path, body)
            else:
                body["tool_choice"] = _FORCED[path](self.tool)
                body.pop("thinking", None)  # Anthropic's API forbids thinking with a forced tool
        return body


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._forward(b"", None)

    do_HEAD = do_GET

    def do_CONNECT(self) -> None:
        """Reject requests for tunnels to other hosts. The agent sends them because `HTTPS_PROXY` names this proxy."""
        self.send_error(403)

    def do_POST(self) -> None:
        raw = self._read()
        path = self.path.partition("?")[0]
        if path not in _FORCED:
            self._forward(raw, None)
            return
        request = RecordedRequest(path, json.loads(raw))
        self.owner.requests.append(request)
        self._forward(json.dumps(self.owner.changed(path, request)).encode(), request)

    def _read(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        whole = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _forward(self, raw: bytes, request: RecordedRequest | None) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _UNSENT}
        connection = http.client.HTTPConnection(urlsplit(self.owner.target).netloc)
        try:
            connection.request(self.command, self.path, raw or None, headers)
            response = connection.getresponse()
            if request:
                request.status = response.status
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _UNSENT:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while part := response.read1(65536):
                self.wfile.write(part)
                self.wfile.flush()
                if request:
                    request.answer += part
        except OSError as error:
            print("the agent or the gateway hung up:", error, flush=True)
        finally:
            self.close_connection = True
            connection.close()

    def log_message(self, format: str, *args: object) -> None:
        print(format % args, flush=True)


def _end(path: str, body: dict[str, Any]) -> None:
    """Change a request body so that the response is one word without tool calls."""
    body["tool_choice"] = {"type": "none"} if path == "/v1/messages" else "none"
    form: dict[str, Any] = {"type": "json_schema", "schema": _ONE_WORD}
    if path == "/v1/messages":
        body["output_config"] = {**(body.get("output_config") or {}), "format": form}
    elif path == "/v1/responses":
        body["text"] = {**(body.get("text") or {}), "format": {**form, "name": "end"}}
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "end", "schema": _ONE_WORD}}


def _is_result(message: dict[str, Any]) -> bool:
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    return (
        message.get("role") == "tool"
        or message.get("type") in ("function_call_output", "custom_tool_call_output")
        or any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)
    )
