"""Run the prompts of a file of JSON lines, and write the results to another file.

A line of the prompt file is a string, a list of messages, or an object with a `prompt` or `messages`. An object may
have an `id`, which is copied to the result. An object may also have options such as `temperature`; see `AskOptions`.
For this prompt, they replace the options that apply to all prompts of the file. Paths in `images` are relative to the
folder of the file. Other fields are ignored.

Results are appended as soon as they are ready, and sorted by prompt at the end of the run. A line has the prompt's
`index`, its `key` (a hash of the prompt and its options), its `id` if present, and the fields of `Completion` or an
`error`. If the process is killed, the next run removes an incomplete last line, and runs the prompts that have no
completion yet.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Self

from helexa.core.sampling import Sampling
from helexa.generation.completion import Completion
from helexa.generation.errors import GenerationError, InvalidRequestError
from helexa.generation.request import AnswerSchema, Ask, Request, alternatives, image_part
from helexa.generation.run_requests import Result
from helexa.generation.tools import chosen_tool, tool_definitions

_MAX_LINE_BYTES = 16 << 20
_SAMPLING = frozenset(field.name for field in fields(Sampling))

# Fields of a result that are omitted if they are empty.
_OMITTED = frozenset({"others", "parsed", "reasoning", "device", "dtype", "tool_calls", "logprobs"})


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a file.

    Attributes:
        index: index of the prompt in the file, from 0. Blank lines are not counted.
        key: hash of the prompt, the model name and all options that affect the response. For an invalid line, the hash
            of the line.
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
    """Yield the lines of a file.

    If a line is longer than `_MAX_LINE_BYTES`, yield only its first `_MAX_LINE_BYTES + 1` bytes. The caller can
    recognize a truncated line by its length.
    """
    while line := file.readline(_MAX_LINE_BYTES + 1):
        yield line
        while len(line) > _MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE_BYTES + 1)


def _item(line: bytes, index: int, ask: Ask, model: str, folder: Path, location: str) -> Item:
    record: Any = None
    try:
        if len(line) > _MAX_LINE_BYTES:
            raise InvalidRequestError(f"the line is longer than {_MAX_LINE_BYTES} bytes; shorten the prompt")
        record = json.loads(line)
        if not isinstance(record, dict):
            record = {"prompt": record}
        line_ask = _with_line_options(record, ask, folder)
        prompt = record.get("prompt", record.get("messages"))
        if prompt is None:
            raise InvalidRequestError("an object needs a 'prompt' or 'messages'; add one to this line")
        request = line_ask.request(prompt, index)
        body = request.body(model)
        # Without a fixed seed, the seed is random in each run. If the key contained a random seed, the next run would
        # not find the prompts that are completed.
        if line_ask.sampling.fixed_seed is None:
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
        raise InvalidRequestError("'images' must be a list of paths or URLs")
    sampling: Any = {name: record[name] for name in _SAMPLING & record.keys()}
    return replace(
        ask,
        sampling=replace(ask.sampling, **sampling) if sampling else ask.sampling,
        system=record.get("system", ask.system),
        schema=AnswerSchema.from_schema(record["schema"]) if "schema" in record else ask.schema,
        think=record.get("think", ask.think),
        images=ask.images if images is None else tuple(image_part(image, folder) for image in images),
        tools=tool_definitions(record["tools"] or ()) if "tools" in record else ask.tools,
        tool_choice=chosen_tool(record["tool_choice"]) if "tool_choice" in record else ask.tool_choice,
        logprobs=alternatives(record["logprobs"]) if "logprobs" in record else ask.logprobs,
    )


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class FileSummary:
    """How many prompts of a file were completed, failed, or did not have to run again.

    Attributes:
        finished: number of prompts that were completed in this run.
        failed: number of prompts that failed in this run. The next run repeats them.
        kept: number of prompts that were already completed in earlier runs.
    """

    finished: int = 0
    failed: int = 0
    kept: int = 0


class ResultFile:
    """The file with the results of a file of prompts.

    This process holds an exclusive lock on the file until the end of the `with` block, if the file system has locks. An
    incomplete last line is removed.

    Raises:
        InvalidRequestError: another process has locked the file, or the file contains other data than results.
        OSError: the file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _locked(path)
        self._finished: dict[int, str] = {}
        self._ordered = True
        self._last = -1
        try:
            self._read_finished()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def is_finished(self, item: Item) -> bool:
        """Return whether the file already contains a completion of the prompt.

        Raises:
            InvalidRequestError: the completion with the prompt's index belongs to another prompt.
        """
        key = self._finished.get(item.index)
        if key is not None and key != item.key:
            raise InvalidRequestError(
                f"{self._path}: result {item.index} belongs to another prompt or to other options; "
                "name another file, or remove this file"
            )
        return key is not None

    def write(self, item: Item, result: Completion | GenerationError) -> None:
        """Append the result of a prompt to the file.

        The result is not lost if this process is killed afterwards.
        """
        record = result_record(item, result)
        if isinstance(result, Completion):
            self._finished[item.index] = item.key
        self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._track_order(item.index)

    def put_in_order(self) -> None:
        """Sort the lines of the file by prompt index.

        If several lines have the same index, only the last remains. Call this method only after the last `write`,
        because the sorted lines are in a new file.
        """
        if self._ordered:
            return
        line_spans: dict[int, tuple[int, int]] = {}
        for start, line in self._lines():
            if (record := _record(line)) is not None:
                line_spans[record["index"]] = (start, len(line))
        # The sorted lines are written to a second file, so that a crash during the sort loses no result. Only the
        # positions of the lines are in memory, because the file may be large.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with temporary.open("xb") as sorted_file, self._path.open("rb") as file:
                for _, (start, size) in sorted(line_spans.items()):
                    file.seek(start)
                    sorted_file.write(file.read(size))
                sorted_file.flush()
                os.fsync(sorted_file.fileno())
            temporary.replace(self._path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        self._ordered = True

    def _read_finished(self) -> None:
        """Read which prompts are completed, and remove an incomplete last line."""
        end = 0
        for start, line in self._lines():
            record = _record(line)
            if record is None:
                if line.endswith(b"\n"):
                    raise InvalidRequestError(f"{self._path} contains other data than results; name another file")
                break
            end = start + len(line)
            self._track_order(record["index"])
            if "error" not in record:
                self._finished[record["index"]] = record["key"]
        self._file.truncate(end)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        start = 0
        with self._path.open("rb") as file:
            for line in file:
                yield start, line
                start += len(line)

    def _track_order(self, index: int) -> None:
        self._ordered = self._ordered and index > self._last
        self._last = index


def result_record(item: Item, result: Completion | GenerationError) -> dict[str, Any]:
    """Return the JSON object for one line of a result file.

    The object contains the prompt's index, key and id, and the fields of the completion or the error.
    """
    record: dict[str, Any] = {"index": item.index, "key": item.key}
    if item.id is not None:
        record["id"] = item.id
    if isinstance(result, Completion):
        return record | completion_record(result)
    return record | {"error": {"type": type(result).__name__, "code": result.code, "message": str(result)}}


def completion_record(completion: Completion) -> dict[str, Any]:
    """Return a completion as a JSON object, without optional fields that are empty."""
    record = asdict(completion) | {"parsed": _json_value(completion.parsed)}
    record["timings"] = {name: round(seconds, 4) for name, seconds in record["timings"].items()}
    if completion.others:
        record["others"] = [completion_record(completion_choice) for completion_choice in completion.others]
    return {name: value for name, value in record.items() if value or name not in _OMITTED}


def _json_value(parsed: Any) -> Any:
    return parsed.model_dump(mode="json") if hasattr(parsed, "model_dump") else parsed


def _record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and type(record.get("index")) is int and isinstance(record.get("key"), str):
            return record
    return None


def _locked(path: Path) -> FileIO:
    file = FileIO(path, "ab")  # unbuffered: written bytes survive the death of this process
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InvalidRequestError(
            f"{path}: another process is writing results to this file; end that process, or name another file"
        ) from None
    except (ImportError, OSError):
        pass  # no file locks on this operating system or file system
    return file


class FileRun:
    """One run over a file of prompts.

    It skips the prompts that an earlier run completed.

    Args:
        results: file of results, which may contain results of an earlier run.
        ask: default options of all prompts. A line of the file can override them.
        model: model name. It is part of the hash that identifies a prompt in the file of results.

    Raises:
        InvalidRequestError: the file of results belongs to other prompts.
        OSError: the prompts cannot be read.
    """

    def __init__(self, prompts: Path, results: ResultFile, ask: Ask, model: str) -> None:
        self._prompts = prompts
        self._results = results
        self._ask = ask
        self._model = model
        self._running: dict[int, Item] = {}
        self.summary = FileSummary(kept=sum(results.is_finished(item) for item in self._items()))

    def requests(self) -> Iterator[Request | GenerationError]:
        """Yield a request for each prompt that has no completion in the result file.

        The prompt file is read lazily. For an invalid line of the file, an error is yielded.
        """
        unfinished = (item for item in self._items() if not self._results.is_finished(item))
        for position, item in enumerate(unfinished):
            self._running[position] = item
            yield item.request

    def take(self, position: int, result: Result) -> int:
        """Write a result to the result file; return the prompt's index in the prompt file.

        Args:
            position: index of the request among the requests that `requests` yielded.
            result: completion or error.
        """
        item = self._running.pop(position)
        self._results.write(item, result)
        if isinstance(result, GenerationError):
            result.at(item.index)
            self.summary = replace(self.summary, failed=self.summary.failed + 1)
        else:
            self.summary = replace(self.summary, finished=self.summary.finished + 1)
        return item.index

    def _items(self) -> Iterator[Item]:
        return read_prompts(self._prompts, self._ask, self._model)
