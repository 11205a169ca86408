"""Parses and translates request bodies: large ones in a worker process."""

from msgspec.structs import replace

from helexa.cortex.anthropic.reply import Translation
from helexa.cortex.anthropic.request_settings_and_token_count import CountRequest
from helexa.cortex.forwarding.request import ClientRequest, parse_request
from helexa.cortex.forwarding.request_body_limit_and_workers import BodyWorkers, check_containers, is_large
from helexa.cortex.forwarding.token_bounds import CHAT
from helexa.cortex.ollama.to_openai import Translation as OllamaTranslation
from helexa.http.headers import Headers


async def read_large_request(workers: BodyWorkers, path: str, headers: Headers, body: bytes) -> ClientRequest:
    """Parse a large request body in a worker process, and return the parsed request.

    Raises:
        ApiError: 400 if the body is invalid or has too many objects and arrays. 503 if too many large bodies wait for
            a worker process, or if the process died.
    """
    request = await workers.run(_parse_large, path, headers, body)
    return replace(request, body=request.body or body, large=True)


async def read_message(workers: BodyWorkers, headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    """Translate a Messages API request; return the translation and the chat request."""
    return await workers.run(_translate_large, headers, body) if is_large(body) else translate(headers, body)


async def read_ollama(
    workers: BodyWorkers, path: str, headers: Headers, body: bytes
) -> tuple[OllamaTranslation, ClientRequest | None]:
    """Parse and translate a request of Ollama's API.

    The second result is the request to forward, or None if the client only loads or unloads the model.
    """
    if is_large(body):
        return await workers.run(_translate_large_ollama, path, headers, body)
    return _translate_ollama(path, headers, body)


async def read_count(workers: BodyWorkers, body: bytes) -> CountRequest:
    """Parse a `POST /v1/messages/count_tokens` request."""
    return await workers.run(_parse_large_count, body) if is_large(body) else CountRequest.parse(body)


def translate(headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    """Parse and translate a Messages API request without a worker process."""
    translation = Translation.parse(body)
    request = parse_request(CHAT, headers, translation.body)
    return translation, replace(request, translated=True, large=is_large(translation.body))


def _translate_ollama(path: str, headers: Headers, body: bytes) -> tuple[OllamaTranslation, ClientRequest | None]:
    translation = OllamaTranslation.parse(path, body)
    if not translation.body:
        return translation, None
    request = parse_request(translation.path, headers, translation.body)
    is_chat = translation.path == CHAT
    return translation, replace(request, translated=is_chat, large=is_large(translation.body))


def _translate_large_ollama(path: str, headers: Headers, body: bytes) -> tuple[OllamaTranslation, ClientRequest | None]:
    check_containers(body)
    return _translate_ollama(path, headers, body)


def _parse_large(path: str, headers: Headers, body: bytes) -> ClientRequest:
    check_containers(body)
    request = parse_request(path, headers, body)
    return replace(request, body=b"") if request.body is body else request  # do not send back an unchanged body


def _translate_large(headers: Headers, body: bytes) -> tuple[Translation, ClientRequest]:
    check_containers(body)
    return translate(headers, body)


def _parse_large_count(body: bytes) -> CountRequest:
    check_containers(body)
    return CountRequest.parse(body)
