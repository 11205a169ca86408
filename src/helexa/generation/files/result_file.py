"""Writes the results of prompts to a file of JSON lines.

Results are appended as soon as they are ready, and sorted by prompt at the end of the run. A line has the prompt's
`index`, its `key` (a hash of the prompt and its options), its `id` if present, and the fields of `Completion` or an
`error`. If the process is killed, the next run removes an incomplete last line, and runs the prompts that have no
completion yet.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, Self

from helexa.generation.completion import Completion
from helexa.generation.errors import GenerationError, InvalidRequestError
from helexa.generation.files.prompt_file import Item

_OMITTED = frozenset({"others", "parsed", "reasoning", "device", "dtype"})  # omitted if empty


class ResultFile:
    """A file of results. This process holds an exclusive lock on the file until the end of the `with` block.

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
        """Append the result of a prompt to the file. The result is not lost if this process is killed afterwards."""
        record = result_record(item, result)
        if isinstance(result, Completion):
            self._finished[item.index] = item.key
        self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._track_order(item.index)

    def put_in_order(self) -> None:
        """Sort the lines of the file by prompt index. If several lines have the same index, only the last remains."""
        if self._ordered:
            return
        line_spans: dict[int, tuple[int, int]] = {}
        for start, line in self._lines():
            if (record := _record(line)) is not None:
                line_spans[record["index"]] = (start, len(line))
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
        """Read which prompts have a completion in the file, and remove an incomplete last line."""
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
    """Return a completion as a JSON object. Optional fields that are empty are omitted."""
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
    except ImportError:
        pass  # no file locks on this system
    except OSError:
        file.close()
        raise InvalidRequestError(f"{path}: another process is writing results to this file") from None
    return file
