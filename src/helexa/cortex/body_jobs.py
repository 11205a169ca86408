"""The work on request bodies that may be done in another process: each function takes and returns plain values."""

from msgspec.structs import replace

from helexa.cortex.anthropic.strict import strict_body
from helexa.cortex.anthropic.translation import Translation
from helexa.cortex.body_workers import BodyWorkers, is_large
from helexa.cortex.headers import Headers
from helexa.cortex.question import Question, parse_question
from helexa.cortex.spending import CHAT


async def read_question(workers: BodyWorkers, path: str, headers: Headers, body: bytes) -> Question:
    """Return what `parse_question` does."""
    if not is_large(body):
        return parse_question(path, headers, body)
    return replace(await workers.run(_without_body, path, headers, body), body=body)


async def read_message(workers: BodyWorkers, headers: Headers, body: bytes) -> tuple[Translation, Question]:
    """Return a request of the Messages API and the chat request that it is translated to."""
    return await workers.run(translate, headers, body) if is_large(body) else translate(headers, body)


def translate(headers: Headers, body: bytes) -> tuple[Translation, Question]:
    """Do the work of `read_message`."""
    translation = Translation.parse(body)
    return translation, replace(parse_question(CHAT, headers, translation.body), strict=strict_body)


def _without_body(path: str, headers: Headers, body: bytes) -> Question:
    return replace(parse_question(path, headers, body), body=b"")
