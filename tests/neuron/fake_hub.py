"""A hub on a local port: as much of the Hugging Face Hub's HTTP as fetching a model needs."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """Serves `repositories[name][file] = content`.

    Attributes:
        refusals: repository name -> (status, X-Error-Code).
        requests: every request line, in order, with the bearer token if there was one.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        listing = path.startswith("/api/models/")
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if name in self.refusals:
            status, code = self.refusals[name]
            return status, {"X-Error-Code": code}, b"{}"
        files = self.repositories.get(name)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = hashlib.sha1(repr(files).encode()).hexdigest()
        if listing:
            siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
            return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
        content = files.get(path.partition("/resolve/main/")[2])
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.requests.append((self.command, path, self.headers.get("Authorization")))
                status, headers, body = hub.answer(path)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
