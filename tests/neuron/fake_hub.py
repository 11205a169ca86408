"""A hub on a local port: as much of the Hugging Face Hub's HTTP as fetching a model needs, and its bad days."""

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
"""Files of so many bytes and more are kept as the Hub keeps large ones: known by their sha256."""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong in one answer.

    Attributes:
        status: the answer is this refusal, with `headers`.
        body: sent instead of the content.
        whole: a range that was asked for is ignored.
        pace: seconds between one tenth of the body and the next.
        cut: bytes after which the connection ends.
        stall: bytes after which nothing more is sent until the hub stops.
    """

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    whole: bool = False
    pace: float = 0.0
    cut: int | None = None
    stall: int | None = None


class FakeHub:
    """Serves `repositories[name][file] = content`.

    Attributes:
        refusals: repository name -> (status, X-Error-Code).
        troubles: file name, or "list" -> what goes wrong with the next requests for it, one after another.
        elsewhere: the hub that the content of files is redirected to.
        requests: every request, in order: method, path, the bearer token if there was one.
        ranges: the ranges that were asked for, with the file's name.
        sent: bytes of content that were sent, by the file's name.
        stalled: set once an answer has stalled.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.troubles: dict[str, deque[Trouble]] = {}
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

    def trouble(self, file: str, *troubles: Trouble) -> None:
        """Let the next requests for `file` go wrong."""
        self.troubles[file] = deque(troubles)

    def downloads(self) -> list[str]:
        """The names of the files that were asked for, in order."""
        return [path.rpartition("/")[2] for _, path, _ in self.requests if "/resolve/" in path]

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        listing = path.startswith("/api/models/")
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if name in self.refusals:
            status, code = self.refusals[name]
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
                with suppress(ConnectionError):  # who has heard enough hangs up
                    self.answer()

            def answer(self) -> None:
                path = unquote(urlsplit(self.path).path)  # those who take us for a proxy name a site before it
                hub.requests.append((self.command, path, self.headers.get("Authorization")))
                status, headers, body = hub.answer(path)
                waiting = hub.troubles.get("list" if path.startswith("/api/") else path.rpartition("/")[2])
                trouble = waiting.popleft() if waiting else Trouble()
                if trouble.status:
                    status, headers, body = trouble.status, dict(trouble.headers), b"{}"
                elif trouble.body is not None:
                    body = trouble.body
                wanted = self.headers.get("Range")
                if wanted:
                    hub.ranges.append((path.rpartition("/")[2], wanted))
                if wanted and status == 200 and not trouble.whole:
                    start, _, last = wanted.removeprefix("bytes=").partition("-")
                    part = body[int(start) : int(last) + 1 if last else None]
                    headers |= {"Content-Range": f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}"}
                    status, body = 206, part
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                body = body[: trouble.stall if trouble.cut is None else trouble.cut]
                if "/resolve/" in path:
                    hub.sent[path.rpartition("/")[2]] += len(body)
                tenth = len(body) // 10 + 1
                for start in range(0, len(body), tenth) if trouble.pace else ():
                    self.wfile.write(body[start : start + tenth])
                    hub._stopped.wait(trouble.pace)
                if not trouble.pace:
                    self.wfile.write(body)
                if trouble.stall is not None:
                    hub.stalled.set()
                    hub._stopped.wait()
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def described(file: str, content: bytes) -> dict[str, object]:
    """An entry of a listing."""
    if len(content) < BIG:
        return {"rfilename": file, "size": len(content), "blobId": git_id(content)}
    lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return {"rfilename": file, "size": len(content), "blobId": git_id(b"a pointer"), "lfs": lfs}


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
