"""Reads prompts from a file of JSON lines.

A line is a string, a list of messages, or an object with a `prompt` or `messages`. An object may have an `id`, which is
copied to the result. An object may also have options such as `temperature`; see `AskOptions`. For this prompt, they
replace the options that apply to all prompts of the file. Paths in `images` are relative to the folder of the file.
Other fields are ignored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from helexa.generation.errors import GenerationError, InvalidRequestError
from helexa.generation.images import image_part
from helexa.generation.request import Ask, Request
from helexa.generation.sampling import Sampling
from helexa.generation.schema import AnswerSchema

_MAX_LINE_BYTES = 16 << 20
_SAMPLING = frozenset(field.name for field in fields(Sampling))


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a file.

    Attributes:
        index: index of the prompt in the file, from 0. Blank lines are not counted.
        key: hash of the prompt, the model name and all options that affect the response.
        id: the field `id` of the line, or None.
        request: the request, or an error if the line is invalid.
    """

    index: int
    key: str
    id: Any
    request: Request | GenerationError


def read_prompts(path: Path, ask: Ask, model: str = "") -> Iterator[Item]:
    """Yield the prompts of a file of JSON lines. Blank lines are skipped.

    Args:
        path: path of the file.
        ask: default options, which a line can override.
        model: model name, which is part of the hash `key` of each prompt.

    Raises:
        OSError: the file cannot be read.
    """
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), start=1):
            if not line.isspace():
                yield _item(line, index, ask, model, path.parent, f"{path.name}, line {number}")
                index += 1


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file. Of a line longer than `_MAX_LINE_BYTES`, yield the first `_MAX_LINE_BYTES + 1` bytes.

    The caller can recognize a truncated line by its length.
    """
    while line := file.readline(_MAX_LINE_BYTES + 1):
        yield line
        while len(line) > _MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE_BYTES + 1)


def _item(line: bytes, index: int, ask: Ask, model: str, folder: Path, location: str) -> Item:
    record: Any = None
    try:
        if len(line) > _MAX_LINE_BYTES:
            raise InvalidRequestError(f"the line is longer than {_MAX_LINE_BYTES} bytes")
        record = json.loads(line)
        if not isinstance(record, dict):
            record = {"prompt": record}
        line_ask = _with_line_options(record, ask, folder)
        prompt = record.get("prompt", record.get("messages"))
        if prompt is None:
            raise InvalidRequestError("an object needs a 'prompt' or 'messages'")
        request = line_ask.request(prompt, index)
        body = request.body(model)
        if line_ask.sampling.seed is None:
            del body["seed"]
        key = _digest(json.dumps(body, sort_keys=True, ensure_ascii=True).encode())
        return Item(index, key, record.get("id"), request)
    except GenerationError as error:
        reason = str(error)
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"invalid JSON or option: {error}"
    name = record.get("id") if isinstance(record, dict) else None
    return Item(index, _digest(line), name, InvalidRequestError(f"{location}: {reason}"))


def _with_line_options(record: Mapping[str, Any], ask: Ask, folder: Path) -> Ask:
    images = record.get("images")
    if not isinstance(images, list | None) or not all(isinstance(image, str) for image in images or ()):
        raise InvalidRequestError("'images' is a list of paths or URLs")
    sampling: Any = {name: record[name] for name in _SAMPLING & record.keys()}
    return Ask(
        replace(ask.sampling, **sampling) if sampling else ask.sampling,
        record.get("system", ask.system),
        AnswerSchema.from_schema(record["schema"]) if "schema" in record else ask.schema,
        record.get("think", ask.think),
        ask.images if images is None else tuple(image_part(image, folder) for image in images),
    )


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
