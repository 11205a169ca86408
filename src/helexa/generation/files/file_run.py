"""Answering a file of prompts: which of them are still to be asked, and what became of those that were."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from helexa.generation.answering import Result
from helexa.generation.errors import GenerationError
from helexa.generation.files.prompt_file import Item, read_prompts
from helexa.generation.files.result_file import ResultFile
from helexa.generation.request import Ask, Request


@dataclass(frozen=True, slots=True)
class FileSummary:
    """What became of a file's prompts.

    Attributes:
        finished: answered in this run.
        failed: without an answer; they are asked again in the next run.
        kept: answered in runs before.
    """

    finished: int = 0
    failed: int = 0
    kept: int = 0


class FileRun:
    """One run over a file of prompts.

    Args:
        ask, model: see `read_prompts`.

    Raises:
        InvalidRequestError: the results are to other prompts.
        OSError: the prompts cannot be read.
    """

    def __init__(self, prompts: Path, results: ResultFile, ask: Ask, model: str) -> None:
        self._prompts = prompts
        self._results = results
        self._ask = ask
        self._model = model
        self._asked: dict[int, Item] = {}
        self.summary = FileSummary(kept=sum(results.is_finished(item) for item in self._items()))

    def requests(self) -> Iterator[Request | GenerationError]:
        """What is still to be asked, read as it is drawn."""
        unfinished = (item for item in self._items() if not self._results.is_finished(item))
        for position, item in enumerate(unfinished):
            self._asked[position] = item
            yield item.request

    def take(self, place: int, result: Result) -> int:
        """Write the result of what was drawn at `place`; returns its index in the file."""
        item = self._asked.pop(place)
        self._results.write(item, result)
        if isinstance(result, GenerationError):
            result.at(item.index)
            self.summary = replace(self.summary, failed=self.summary.failed + 1)
        else:
            self.summary = replace(self.summary, finished=self.summary.finished + 1)
        return item.index

    def _items(self) -> Iterator[Item]:
        return read_prompts(self._prompts, self._ask, self._model)
