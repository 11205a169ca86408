"""A local HTTP server with the parts of the Hugging Face Hub's API that downloads use, and with injected faults."""

import hashlib
import json
import threading
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit
from zlib import crc32

BIG = 1000
"""Size in bytes from which a file is listed like a Git LFS file on the Hub, with its sha256."""


@dataclass(frozen=True)
class Fault:
    """Errors to inject into one HTTP response.

    Attributes:
        status: status of an error response, sent with `headers` instead of the file.
        body: sent instead of the file's content.
        ignore_range: send the whole file although the request has a range.
        pace: pause in seconds after each tenth of the body.
        cut: number of bytes after which the hub closes the connection.
        stall: number of bytes after which the hub sends nothing until it stops.
    """

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    ignore_range: bool = False
    pace: float = 0.0
    cut: int | None = None
    stall: int | None = None


class FakeHub:
    """Serves `repositories[name][file] = content`.

    Attributes:
        error_responses: by repository name, the status and X-Error-Code of the error response to every request.
        faults: by file name, or "list" for the file list, the errors to inject into the next responses.
        elsewhere: hub to which downloads are redirected.
        requests: method, path and Authorization header of every request, in order.
        ranges: file name and range of every range request.
        sent: bytes of content sent, by file name.
        stalled: set when a response has stalled.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.error_responses: dict[str, tuple[int, str]] = {}
        self.faults: dict[str, deque[Fault]] = {}
        self.elsewhere: FakeHub | None = None
        self.requests: list[tuple[str, str, str | None]] = []
        self.ranges: list[tuple[str, str]] = []
        self.sent: Counter[str] = Counter()
        self.stalled = threading.Event()
        self._stopped = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def inject(self, file: str, *faults: Fault) -> None:
        """Inject `faults` into the next responses for `file`, one each."""
        self.faults[file] = deque(faults)

    def downloads(self) -> list[str]:
        """Return the names of the requested files, in order."""
        return [path.rpartition("/")[2] for _, path, _ in self.requests if "/resolve/" in path]

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        listing = path.startswith("/api/models/")
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if name in self.error_responses:
            status, code = self.error_responses[name]
            return status, {"X-Error-Code": code}, b"{}"
        files = self.repositories.get(name)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = hashlib.sha1(repr([(file, crc32(content)) for file, content in files.items()]).encode()).hexdigest()
        if listing:
            siblings = [described(file, content) for file, content in files.items()]
            return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
        content = files.get(path.partition(f"/resolve/{commit}/")[2])
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if self.elsewhere is not None:
            return 302, {"Location": self.elsewhere.url + path}, b""
        return 200, {}, content

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with suppress(ConnectionError):  # the client has closed the connection
                    self.answer()

            def answer(self) -> None:
                path = unquote(urlsplit(self.path).path)  # requests to a proxy contain a full URL
                hub.requests.append((self.command, path, self.headers.get("Authorization")))
                status, headers, body = hub.answer(path)
                waiting = hub.faults.get("list" if path.startswith("/api/") else path.rpartition("/")[2])
                fault = waiting.popleft() if waiting else Fault()
                if fault.status:
                    status, headers, body = fault.status, dict(fault.headers), b"{}"
                elif fault.body is not None:
                    body = fault.body
                wanted = self.headers.get("Range")
                if wanted:
                    hub.ranges.append((path.rpartition("/")[2], wanted))
                if wanted and status == 200 and not fault.ignore_range:
                    start, _, last = wanted.removeprefix("bytes=").partition("-")
                    content = body[int(start) : int(last) + 1 if last else None]
                    headers |= {"Content-Range": f"bytes {start}-{int(start) + len(content) - 1}/{len(body)}"}
                    status, body = 206, content
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                body = body[: fault.stall if fault.cut is None else fault.cut]
                if "/resolve/" in path:
                    hub.sent[path.rpartition("/")[2]] += len(body)
                tenth = len(body) // 10 + 1
                for start in range(0, len(body), tenth) if fault.pace else ():
                    self.wfile.write(body[start : start + tenth])
                    hub._stopped.wait(fault.pace)
                if not fault.pace:
                    self.wfile.write(body)
                if fault.stall is not None:
                    hub.stalled.set()
                    hub._stopped.wait()
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def described(file: str, content: bytes) -> dict[str, object]:
    """Return a file's entry in the repository's file list."""
    if len(content) < BIG:
        return {"rfilename": file, "size": len(content), "blobId": git_id(content)}
    lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return {"rfilename": file, "size": len(content), "blobId": git_id(b"a pointer"), "lfs": lfs}


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
