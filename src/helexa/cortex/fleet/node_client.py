"""Client for a node's management API."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from helexa.core.logs import quoted
from helexa.core.node_reports import (
    MAX_LOCAL_MODELS,
    Discovery,
    Health,
    LocalModel,
    LocalModels,
    ModelInfo,
    ModelSpec,
    Pull,
    Record,
    WireInt,
)
from helexa.cortex.fleet.fleet_view import Node, Report
from helexa.cortex.fleet.node_errors import NodeError, error_reason, failure_reason, memory_rejection
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.connection_and_timeouts import LocalConnectError, UpstreamError, UpstreamResponse
from helexa.http.headers import Headers

log = logging.getLogger(__name__)

POLL_TIMEOUT_SECS = 5.0
# Limits on what a node reports. A node may be any program, and the gateway keeps all reports in memory.
MAX_MODELS = 1000
MAX_ID_CHARS = 256
UNLOAD_TIMEOUT_SECS = 60.0
MAX_RESPONSE_BYTES = 8 << 20

_STATUS_ADVICE = dict.fromkeys((401, 403), "; check the bearer of the node") | {
    404: "; check the endpoint and the kind of the node"
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # not part of JSON, but some servers on Windows send it
_MAX_URL_REQUESTS = 64
_MAX_HOST_CHARS = 100
_SERVING = ("loaded", "reloading")
_LOOPBACK = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
_RETRYABLE_ERRORS = ("repo_fetch_failed",)

ValueT = TypeVar("ValueT")
Params = ParamSpec("Params")


class _PullList(Record):
    pulls: list[Pull] = Field(default_factory=list[Pull], max_length=1000)


class _Cleared(Record):
    deleted_bytes: WireInt = 0


class _Estimate(Record):
    memory_mb: WireInt | None = None


_discovery = TypeAdapter(Discovery)
_health = TypeAdapter(Health)
_model_info = TypeAdapter(ModelInfo)
_entries = TypeAdapter(list[dict[str, Any]])
_endpoint = TypeAdapter(dict[str, Any])
_estimate = TypeAdapter(_Estimate)
_cleared = TypeAdapter(_Cleared)
_pull = TypeAdapter(Pull)
_pulls = TypeAdapter(_PullList)


class NodeClient:
    """HTTP client for the management API of nodes. Failed requests raise `NodeError`."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def poll(self, node: Node, bearer: str | None = None) -> Report:
        """Poll a node of kind `neuron` and return its report.

        The poll fails only if `GET /models` fails. If another request fails, the report lacks only the result of that
        request.
        """
        models = await self.models(node.endpoint, bearer)
        health, discovery, urls = await asyncio.gather(
            or_none(self.health, node.endpoint, bearer),
            or_none(self.discovery, node.endpoint, bearer) if node.discovery is None or node.misses else _none(),
            self._urls(node, models, bearer),
        )
        local = None
        revision = None if health is None else health.local_revision
        if revision is not None and (node.local is None or node.local.revision != revision):
            local = await or_none(self.local_models, node.endpoint, bearer)
        return Report(models, health, discovery, urls, local)

    async def discovery(self, endpoint: str, bearer: str | None = None) -> Discovery:
        """Return the node's hardware, from `GET /discovery`."""
        return parse(_discovery, await self.get(endpoint, "/discovery", bearer))

    async def health(self, endpoint: str, bearer: str | None = None) -> Health:
        """Return the node's health, from `GET /health`."""
        return parse(_health, await self.get(endpoint, "/health", bearer))

    async def models(self, endpoint: str, bearer: str | None = None) -> dict[str, ModelInfo]:
        """Return at most `MAX_MODELS` of the node's models by id, without invalid entries."""
        models_by_id: dict[str, ModelInfo] = {}
        for entry in parse(_entries, await self.get(endpoint, "/models", bearer))[:MAX_MODELS]:
            try:
                info = _model_info.validate_python(entry)
            except ValidationError:
                continue
            models_by_id[info.id] = info
        return models_by_id

    async def local_models(self, endpoint: str, bearer: str | None = None) -> LocalModels:
        """Return the models on the node's disks. Invalid entries are ignored."""
        report = parse(_endpoint, await self.get(endpoint, "/models/local", bearer))
        entries = report.get("models")
        models: list[LocalModel] = []
        for entry in entries[:MAX_LOCAL_MODELS] if isinstance(entries, list) else []:
            try:
                model = LocalModel.model_validate(entry)
            except ValidationError:
                continue
            if is_usable_id(model.id):
                models.append(model)
        try:
            return LocalModels.model_validate(report | {"models": models})
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise NodeError(f"the response of /models/local is invalid: {problem}; check the node's version") from None

    async def estimate_mb(self, endpoint: str, spec: ModelSpec, bearer: str | None = None) -> int | None:
        """Return the MB of memory that a model needs on a node; None if unknown."""
        body = await self.post(endpoint, "/models/estimate", spec.json_dict(), bearer)
        return parse(_estimate, body).memory_mb

    async def pulls(self, endpoint: str, bearer: str | None = None) -> list[Pull]:
        """Return the downloads of the node, from `GET /models/pulls`."""
        return parse(_pulls, await self.get(endpoint, "/models/pulls", bearer)).pulls

    async def start_pull(self, endpoint: str, model: str, bearer: str | None = None) -> Pull:
        """Start a download with `POST /models/pull`, and return its state."""
        return await self._change_pull(endpoint, "/models/pull", model, bearer)

    async def cancel_pull(self, endpoint: str, model: str, bearer: str | None = None) -> Pull:
        """Cancel a download with `POST /models/pull/cancel`, and return its state."""
        return await self._change_pull(endpoint, "/models/pull/cancel", model, bearer)

    async def _change_pull(self, endpoint: str, path: str, model: str, bearer: str | None) -> Pull:
        body = orjson.dumps({"model": model})
        status, answer = await self._call("POST", endpoint, path, POLL_TIMEOUT_SECS, body, bearer)
        if status // 100 != 2:
            reason, _ = error_reason(answer)
            raise NodeError(reason or f"{path} answered HTTP {status}; see the node's log", status=status)
        return parse(_pull, answer)

    async def url(self, node: Node, model: str, bearer: str | None = None) -> str:
        """Return the base URL of the API that serves `model`.

        The result is the URL that the node reports for the model. If the node reports no URL, or a URL that is not
        allowed, the result is the node's endpoint.
        """
        try:
            path = f"/models/{quote(model, safe='')}/endpoint"
            url = parse(_endpoint, await self.get(node.endpoint, path, bearer)).get("url")
        except NodeError:
            return node.endpoint
        try:
            return reachable_url(url, node.endpoint, node.allowed_hosts) if isinstance(url, str) else node.endpoint
        except ValueError as error:
            log.warning(
                "reported address not used node=%s model=%s error=%s; requests go to the node's endpoint",
                *(node.name, quoted(model), quoted(error)),
            )
            return node.endpoint

    async def load(self, endpoint: str, spec: ModelSpec, bearer: str | None = None) -> None:
        """Load a model, and return once the model accepts requests.

        If the model is already loaded, the call succeeds. The call has no timeout: the caller must watch the load's
        progress and cancel the call if the load makes no progress.
        """
        status, body = await self._call("POST", endpoint, "/models/load", None, orjson.dumps(spec.json_dict()), bearer)
        if status // 100 == 2 or b"already loaded" in body:
            return
        reason, details = error_reason(body)
        memory = memory_rejection(details)
        temporary = status >= 500 or details.get("kind") in _RETRYABLE_ERRORS or memory is not None
        raise NodeError(
            reason or f"the node answered HTTP {status}; see the node's log", temporary=temporary, memory=memory
        )

    async def unload(self, endpoint: str, model: str, bearer: str | None = None) -> None:
        """Unload a model if it is loaded, and return once its memory is free."""
        status, body = await self._call(
            "POST", endpoint, "/models/unload", UNLOAD_TIMEOUT_SECS, orjson.dumps({"model_id": model}), bearer
        )
        if status // 100 != 2 and status != 404:
            raise NodeError(error_reason(body)[0] or f"/models/unload answered HTTP {status}; see the node's log")

    async def clear_prefix_cache(self, endpoint: str, model: str, bearer: str | None = None) -> int:
        """Clear a model's prefix cache on a node; return the number of bytes deleted.

        A raised `NodeError` has the HTTP status. Status 404 means that the node does not know the model.
        """
        path = f"/models/{quote(model, safe='')}/prefix-cache"
        status, body = await self._call("DELETE", endpoint, path, UNLOAD_TIMEOUT_SECS, None, bearer)
        if status // 100 != 2:
            raise NodeError(
                error_reason(body)[0] or f"{path} answered HTTP {status}; see the node's log", status=status
            )
        return parse(_cleared, body).deleted_bytes

    async def sleep(self, endpoint: str, model: str, bearer: str | None = None) -> bool:
        """Put an idle model to sleep, and return once its memory is free.

        Return False if the node does not have the model, or cannot put models to sleep.
        """
        status, body = await self._call(
            "POST", endpoint, "/models/sleep", UNLOAD_TIMEOUT_SECS, orjson.dumps({"model_id": model}), bearer
        )
        if status // 100 != 2 and status not in (404, 405):
            raise NodeError(error_reason(body)[0] or f"/models/sleep answered HTTP {status}; see the node's log")
        return status // 100 == 2

    async def keep_awake(self, endpoint: str, model: str, bearer: str | None = None) -> None:
        """Prevent a loaded model from falling asleep when idle, until it is unloaded."""
        await self.post(endpoint, "/models/keep", {"model_id": model, "idle_unload_secs": 0}, bearer)

    async def response(
        self,
        method: str,
        endpoint: str,
        id: str,
        identity: Mapping[str, str],
        bearer: str | None = None,
        subpath: str = "",
    ) -> tuple[int, bytes]:
        """Read or delete a stored response; return the HTTP status and the body.

        Status 404 means that the node stores no response under this id for the principal. Statuses other than 200, 400
        and 404 raise `NodeError`.

        Args:
            identity: headers that name the principal (account and API key) of the request.
            subpath: path and query string to append after the id.
        """
        path = f"/v1/responses/{quote(id, safe='')}{subpath}"
        status, body = await self._call(method, endpoint, path, POLL_TIMEOUT_SECS, None, bearer, identity)
        if status not in (200, 400, 404):
            raise NodeError(f"{path} answered HTTP {status}{_STATUS_ADVICE.get(status, '')}")
        return status, body

    async def get(self, endpoint: str, path: str, bearer: str | None = None) -> bytes:
        """Send a GET request and return the body. An error status raises `NodeError`."""
        return await self._call_ok("GET", endpoint, path, None, bearer)

    async def post(self, endpoint: str, path: str, content: object, bearer: str | None = None) -> bytes:
        """Send `content` as JSON and return the body of the response.

        An error status, or no response within `POLL_TIMEOUT_SECS`, raises `NodeError`.
        """
        return await self._call_ok("POST", endpoint, path, orjson.dumps(content), bearer)

    async def _call_ok(self, method: str, endpoint: str, path: str, data: bytes | None, bearer: str | None) -> bytes:
        status, body = await self._call(method, endpoint, path, POLL_TIMEOUT_SECS, data, bearer)
        if status // 100 != 2:
            raise NodeError(f"{path} answered HTTP {status}{_STATUS_ADVICE.get(status, '')}", status=status)
        return body.removeprefix(_BYTE_ORDER_MARK)

    async def _urls(self, node: Node, models: Mapping[str, ModelInfo], bearer: str | None) -> dict[str, str]:
        """Return the known base URLs of APIs by model id. Loading models have none."""
        # A known URL is requested again only after a failed poll. At most `_MAX_URL_REQUESTS` URLs are requested per
        # poll. Models that are still loading are skipped, because the node does not know their URLs yet.
        known_urls = {} if node.misses else node.urls
        new_models = [id for id, info in models.items() if id not in known_urls and info.status in _SERVING][
            :_MAX_URL_REQUESTS
        ]
        new_urls = await asyncio.gather(*(self.url(node, model, bearer) for model in new_models))
        kept_urls = {model: known_urls[model] for model in models if model in known_urls}
        return kept_urls | dict(zip(new_models, new_urls, strict=True))

    async def _call(
        self,
        method: str,
        endpoint: str,
        path: str,
        timeout_secs: float | None,
        data: bytes | None,
        bearer: str | None,
        identity: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        headers = [(name.encode(), value.encode()) for name, value in (identity or {}).items()]
        if data:
            headers.append((b"content-type", b"application/json"))
        headers += bearer_header(bearer)
        answer: UpstreamResponse | None = None
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_secs):
                answer = await self._upstream.ask(
                    method.encode(), endpoint, path, headers, data or b"", is_alive=lambda: True
                )
                while chunk := await answer.chunk():
                    body += chunk
                    if len(body) > MAX_RESPONSE_BYTES:
                        raise NodeError(
                            f"{path} answered with more than {MAX_RESPONSE_BYTES} bytes; check the endpoint of the node"
                        )
                return answer.status, bytes(body)
        except TimeoutError:
            raise NodeError(f"{path} did not answer in time; see the node's log", timed_out=True) from None
        except UpstreamError as error:
            reason = failure_reason(error, endpoint, path, begun=answer is not None)
            raise NodeError(reason, local=isinstance(error, LocalConnectError)) from error
        finally:
            if answer is not None:
                answer.close()


def bearer_header(key: str | None) -> Headers:
    """Return the `Authorization` header for a node's API key; empty without a key."""
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]


def is_usable_id(model: str) -> bool:
    """Return whether an id has up to `MAX_ID_CHARS` characters and no leading hyphen."""
    return len(model) <= MAX_ID_CHARS and not model.startswith("-")  # `ModelId` has checked the characters


def reachable_url(url: str, endpoint: str, allowed_hosts: Collection[str] = ()) -> str:
    """Convert a URL that a node reported to a URL that the gateway can reach.

    A loopback host, which would mean the gateway itself, is replaced by the host of `endpoint`. The gateway sends
    prompts and the node's API key to this URL, so its host must be the host of `endpoint` or an allowed host.

    Args:
        endpoint: the node's configured base URL.
        allowed_hosts: other allowed hosts, in lower case.

    Raises:
        ValueError: the URL is malformed, its host is not allowed, or it is not https although `endpoint` is.
    """
    configured = urlsplit(endpoint)
    try:
        url_parts = urlsplit(url)
        host, port = url_parts.hostname, url_parts.port
        (host or "").encode("idna")
    except ValueError:
        url_parts, host, port = urlsplit(""), None, None
    if url_parts.scheme not in ("http", "https") or not host:
        raise ValueError(
            f"the reported URL {url[:_MAX_HOST_CHARS]!r} is not an http(s) URL; correct the URL on the node"
        )
    if host in _LOOPBACK:
        host = configured.hostname or host
    if host != configured.hostname and host not in allowed_hosts:
        raise ValueError(
            f"the reported host {host[:_MAX_HOST_CHARS]!r} is not the host of the endpoint; add the reported host to "
            "allowed_hosts"
        )
    if configured.scheme == "https" and url_parts.scheme != "https":
        raise ValueError("the reported URL is http, but the node's endpoint is https; let the node report an https URL")
    host = f"[{host}]" if ":" in host else host
    return urlunsplit((url_parts.scheme, f"{host}:{port}" if port else host, url_parts.path.rstrip("/"), "", ""))


def parse(adapter: TypeAdapter[ValueT], body: bytes) -> ValueT:
    """Parse the JSON body of a node's response, and return the value.

    Raises:
        NodeError: the body is not JSON of the type of `adapter`.
    """
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        field_path = ".".join(str(part) for part in first_error["loc"])
        problem = f"{field_path}: {first_error['msg']}"
        raise NodeError(
            f"the node's response is invalid: {problem}; check the endpoint and the version of the node"
        ) from None


async def or_none(
    call: Callable[Params, Awaitable[ValueT]], *args: Params.args, **kwargs: Params.kwargs
) -> ValueT | None:
    """Await `call` and return its result, or None if it raises `NodeError`."""
    try:
        return await call(*args, **kwargs)
    except NodeError:
        return None


async def _none() -> None:
    return None
