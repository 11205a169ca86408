"""Work on request bodies that can run in another process: each function takes and returns plain values."""

from msgspec.structs import replace

from helexa.cortex.anthropic.count import CountRequest
from helexa.cortex.anthropic.requests.strict import strict_body
from helexa.cortex.anthropic.translation import Translation
from helexa.cortex.requests.body_bounds import check_containers
from helexa.cortex.requests.body_workers import BodyWorkers, is_large
from helexa.cortex.requests.request import ClientRequest, parse_question
from helexa.cortex.usage.token_limit import CHAT
from helexa.http.connections.request_head import Headers


async def read_question(workers: BodyWorkers, path: str, headers: Headers, body: bytes) -> ClientRequest:
    """Return the result of `parse_question`.

    Raises:
        ApiError: as `parse_question`; 400 for too many objects and arrays.
    """
    if not is_large(body):
        return parse_question(path, headers, body)
    return replace(await workers.run(_parse_large, path, headers, body), body=body, large=True)


async def read_message(workers: BodyWorkers, headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    """Return a request of the Messages API, and the chat request that it is translated to."""
    return await workers.run(_translate_large, headers, body) if is_large(body) else translate(headers, body)


async def read_count(workers: BodyWorkers, body: bytes) -> CountRequest:
    """Return the result of `CountRequest.parse`."""
    return await workers.run(_parse_large_count, body) if is_large(body) else CountRequest.parse(body)


def translate(headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    """Do the work of `read_message` in this process."""
    translation = Translation.parse(body)
    request = parse_question(CHAT, headers, translation.body)
    return translation, replace(request, strict=strict_body, large=is_large(translation.body))


def _parse_large(path: str, headers: Headers, body: bytes) -> ClientRequest:
    check_containers(body)
    return replace(parse_question(path, headers, body), body=b"")  # the caller has the body, so it is not sent back


def _translate_large(headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    check_containers(body)
    return translate(headers, body)


def _parse_large_count(body: bytes) -> CountRequest:
    check_containers(body)
    return CountRequest.parse(body)
