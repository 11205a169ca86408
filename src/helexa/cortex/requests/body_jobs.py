"""Parses and translates request bodies. Large bodies are processed in a worker process."""

from msgspec.structs import replace

from helexa.cortex.anthropic.count import CountRequest
from helexa.cortex.anthropic.messages_format import Translation
from helexa.cortex.anthropic.requests.strict import strict_body
from helexa.cortex.requests.body_bounds import check_containers
from helexa.cortex.requests.body_workers import BodyWorkers, is_large
from helexa.cortex.requests.request import ClientRequest, parse_request
from helexa.cortex.usage.token_limit import CHAT
from helexa.http.connections.request_head import Headers


async def read_request(workers: BodyWorkers, path: str, headers: Headers, body: bytes) -> ClientRequest:
    """Parse a request body, and return the parsed request. A large body is parsed in a worker process.

    Raises:
        ApiError: 400 if the body is invalid or has too many objects and arrays. 503 if too many large bodies wait for
            a worker process, or if the process died.
    """
    if not is_large(body):
        return parse_request(path, headers, body)
    return replace(await workers.run(_parse_large, path, headers, body), body=body, large=True)


async def read_message(workers: BodyWorkers, headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    """Parse a Messages API request, and translate it to a chat request. A large body is parsed in a worker process."""
    return await workers.run(_translate_large, headers, body) if is_large(body) else translate(headers, body)


async def read_count(workers: BodyWorkers, body: bytes) -> CountRequest:
    """Parse a `POST /v1/messages/count_tokens` request. A large body is parsed in a worker process."""
    return await workers.run(_parse_large_count, body) if is_large(body) else CountRequest.parse(body)


def translate(headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    """Parse a Messages API request, and translate it to a chat request, without a worker process."""
    translation = Translation.parse(body)
    request = parse_request(CHAT, headers, translation.body)
    return translation, replace(request, strict=strict_body, large=is_large(translation.body))


def _parse_large(path: str, headers: Headers, body: bytes) -> ClientRequest:
    check_containers(body)
    return replace(parse_request(path, headers, body), body=b"")  # the calling process already has the body


def _translate_large(headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    check_containers(body)
    return translate(headers, body)


def _parse_large_count(body: bytes) -> CountRequest:
    check_containers(body)
    return CountRequest.parse(body)
