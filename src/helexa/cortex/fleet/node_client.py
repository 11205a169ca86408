"""Client for a node's management API."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import aiohttp
import orjson
from pydantic import TypeAdapter, ValidationError
from yarl import URL

from helexa.core.errors import HelexaError
from helexa.core.fleet import Discovery, Health, ModelInfo, ModelSpec
from helexa.cortex.fleet.fleet_view import Node, Report
from helexa.http.connections.local_errors import is_local_error

log = logging.getLogger(__name__)

POLL_TIMEOUT_SECS = 5.0
MAX_MODELS = 1000
UNLOAD_TIMEOUT_SECS = 60.0
MAX_RESPONSE_BYTES = 8 << 20
MAX_REASON_CHARS = 300

_MAX_URL_REQUESTS = 64
_MAX_HOST_CHARS = 100
_SERVING = ("loaded", "reloading")
_LOOPBACK = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
_RETRYABLE_ERRORS = ("repo_fetch_failed",)

ValueT = TypeVar("ValueT")
Params = ParamSpec("Params")

_discovery = TypeAdapter(Discovery)
_health = TypeAdapter(Health)
_model_info = TypeAdapter(ModelInfo)
_entries = TypeAdapter(list[dict[str, Any]])
_endpoint = TypeAdapter(dict[str, Any])


class NodeError(HelexaError):
    """Raised if a node did not answer, or answered with an error.

    Attributes:
        temporary: True if the same call may succeed later.
        local: True if the call failed because the gateway itself is out of file descriptors, ports or memory.
    """

    def __init__(self, message: str, *, temporary: bool = True, local: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary
        self.local = local


class NodeClient:
    """HTTP client for the management API of nodes. Every method raises `NodeError` if the request fails."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def poll(self, node: Node, bearer: str | None = None) -> Report:
        """Poll a node of kind `neuron` and return its report.

        The poll fails only if `GET /models` fails. If another request fails, the report lacks only the result of that
        request. Known hardware and known model URLs are requested again only after a failed poll.
        """
        models = await self.models(node.endpoint, bearer)
        health, discovery, urls = await asyncio.gather(
            or_none(self.health, node.endpoint, bearer),
            or_none(self.discovery, node.endpoint, bearer) if node.discovery is None or node.misses else _none(),
            self._urls(node, models, bearer),
        )
        return Report(models, health, discovery, urls)

    async def discovery(self, endpoint: str, bearer: str | None = None) -> Discovery:
        """Return the node's hardware, from `GET /discovery`."""
        return parse(_discovery, await self.get(endpoint, "/discovery", bearer))

    async def health(self, endpoint: str, bearer: str | None = None) -> Health:
        """Return the node's health, from `GET /health`."""
        return parse(_health, await self.get(endpoint, "/health", bearer))

    async def models(self, endpoint: str, bearer: str | None = None) -> dict[str, ModelInfo]:
        """Return the node's models by id, from `GET /models`.

        Entries after the first `MAX_MODELS` and invalid entries, such as those with an unknown status, are ignored.
        """
        models_by_id: dict[str, ModelInfo] = {}
        for entry in parse(_entries, await self.get(endpoint, "/models", bearer))[:MAX_MODELS]:
            try:
                info = _model_info.validate_python(entry)
            except ValidationError:
                continue
            models_by_id[info.id] = info
        return models_by_id

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
            log.warning("node=%s reported an address for model=%s that is not used: %s", node.name, model, error)
            return node.endpoint

    async def load(self, endpoint: str, spec: ModelSpec, bearer: str | None = None) -> None:
        """Load a model with `POST /models/load` and return once the model accepts requests.

        If the model is already loaded, the call succeeds. The call has no timeout: the caller must watch the load's
        progress and cancel the call if the load makes no progress.
        """
        status, body = await self._call("POST", endpoint, "/models/load", None, orjson.dumps(spec.json_dict()), bearer)
        if status // 100 == 2 or b"already loaded" in body:
            return
        reason, kind = _error_reason(body)
        temporary = status >= 500 or kind in _RETRYABLE_ERRORS
        raise NodeError(reason or f"the node answered HTTP {status}", temporary=temporary)

    async def unload(self, endpoint: str, model: str, bearer: str | None = None) -> None:
        """Unload a model with `POST /models/unload` and return once the model's memory is free.

        If the model is not loaded, the call succeeds.
        """
        status, body = await self._call(
            "POST", endpoint, "/models/unload", UNLOAD_TIMEOUT_SECS, orjson.dumps({"model_id": model}), bearer
        )
        if status // 100 != 2 and status != 404:
            raise NodeError(_error_reason(body)[0] or f"the node answered HTTP {status}")

    async def response(
        self,
        method: str,
        endpoint: str,
        id: str,
        identity: Mapping[str, str],
        bearer: str | None = None,
        subpath: str = "",
    ) -> tuple[int, bytes]:
        """Send `GET` or `DELETE /v1/responses/{id}` to a node, and return the HTTP status and the body.

        Status 404 means that the node stores no response under this id for the principal.

        Args:
            method: `GET` or `DELETE`.
            endpoint: the node's base URL.
            id: id of the response.
            identity: headers that name the principal (account and API key) of the request.
            bearer: the API key that the node requires, or None.
            subpath: path and query string to append after the id.
        """
        path = f"/v1/responses/{quote(id, safe='')}{subpath}"
        status, body = await self._call(method, endpoint, path, POLL_TIMEOUT_SECS, None, bearer, identity)
        if status not in (200, 400, 404):
            raise NodeError(f"{path} answered HTTP {status}")
        return status, body

    async def get(self, endpoint: str, path: str, bearer: str | None = None) -> bytes:
        """Send a GET request and return the response body. Any status other than 200 raises `NodeError`."""
        return await self._call_ok("GET", endpoint, path, None, bearer)

    async def post(self, endpoint: str, path: str, content: object, bearer: str | None = None) -> bytes:
        """Send `content` as JSON in a POST request, and return the response body.

        A status other than 200, or no response within `POLL_TIMEOUT_SECS`, raises `NodeError`.
        """
        return await self._call_ok("POST", endpoint, path, orjson.dumps(content), bearer)

    async def _call_ok(self, method: str, endpoint: str, path: str, data: bytes | None, bearer: str | None) -> bytes:
        status, body = await self._call(method, endpoint, path, POLL_TIMEOUT_SECS, data, bearer)
        if status != 200:
            raise NodeError(f"{path} answered HTTP {status}")
        return body

    async def _urls(self, node: Node, models: Mapping[str, ModelInfo], bearer: str | None) -> dict[str, str]:
        """Return the base URL of each model's API, by model id.

        A known URL is requested again only after a failed poll. At most `_MAX_URL_REQUESTS` URLs are requested per
        poll. Models that are still loading are skipped, because the node does not know their URLs yet.
        """
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
        headers = {**(identity or {}), **({"content-type": "application/json"} if data else {})}
        if bearer is not None:
            headers["authorization"] = f"Bearer {bearer}"
        timeout = aiohttp.ClientTimeout(total=timeout_secs, sock_connect=POLL_TIMEOUT_SECS)
        body = bytearray()
        try:
            async with self._session.request(
                method, endpoint_url(endpoint, path), data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_RESPONSE_BYTES:
                        raise NodeError(f"{path} answered with more than {MAX_RESPONSE_BYTES} bytes")
                return response.status, bytes(body)
        except TimeoutError:
            raise NodeError(f"{path} did not answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            is_local = is_local_error(error)
            raise NodeError(f"{path} request failed: {type(error).__name__}", local=is_local) from error


def endpoint_url(base: str, path: str) -> URL:
    """Return the URL `base` + `path`. The path must already be percent-encoded."""
    return URL(base + path, encoded=True)


def reachable_url(url: str, endpoint: str, allowed_hosts: Collection[str] = ()) -> str:
    """Return a URL that a node reported, changed so that the gateway can reach it.

    A loopback host, which would mean the gateway itself, is replaced by the host of `endpoint`. The gateway sends
    prompts and the node's API key to this URL, so its host must be the host of `endpoint` or an allowed host.

    Args:
        url: the URL that the node reported.
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
        raise ValueError("it is not an http URL")
    if host in _LOOPBACK:
        host = configured.hostname or host
    if host != configured.hostname and host not in allowed_hosts:
        raise ValueError(f"its host {host[:_MAX_HOST_CHARS]!r} is not the node's; add the host to allowed_hosts")
    if configured.scheme == "https" and url_parts.scheme != "https":
        raise ValueError("it is not https as the node's endpoint is")
    host = f"[{host}]" if ":" in host else host
    return urlunsplit((url_parts.scheme, f"{host}:{port}" if port else host, url_parts.path.rstrip("/"), "", ""))


def parse(adapter: TypeAdapter[ValueT], body: bytes) -> ValueT:
    """Parse and validate the JSON body of a node's response.

    Raises:
        NodeError: the body is not JSON of the type that `adapter` validates.
    """
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        field_path = ".".join(str(part) for part in first_error["loc"])
        raise NodeError(f"invalid response: {field_path}: {first_error['msg']}") from None


def _error_reason(body: bytes) -> tuple[str, str | None]:
    """Return the error message and the error kind from the body of a node's error response.

    The body has the form `{"error": "text"}` or `{"error": {"kind": ..., "message": ...}}`. If the body has neither
    form, the message is empty. Line breaks in the message become spaces. The kind is None if the body contains none.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", None
    error = content.get("error") if isinstance(content, Mapping) else None
    kind = None
    if isinstance(error, Mapping):
        kind = error.get("kind") if isinstance(error.get("kind"), str) else None
        error = error.get("message") or kind
    if not isinstance(error, str):
        return "", kind
    line = " ".join(error.split())
    return line[:MAX_REASON_CHARS], kind


async def or_none(
    call: Callable[Params, Awaitable[ValueT]], *args: Params.args, **kwargs: Params.kwargs
) -> ValueT | None:
    """Await `call` with the arguments and return its result, or None if it raises `NodeError`."""
    try:
        return await call(*args, **kwargs)
    except NodeError:
        return None


async def _none() -> None:
    return None
