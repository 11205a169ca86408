"""Runs a file of prompts: selects the prompts that the result file does not answer yet, and writes their results."""

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
    """Counts of the prompts in a file after a run.

    Attributes:
        finished: number of prompts answered in this run.
        failed: number of failed prompts, which the next run repeats.
        kept: number of prompts answered in earlier runs.
    """

    finished: int = 0
    failed: int = 0
    kept: int = 0


class FileRun:
    """One run over a file of prompts.

    Args:
        prompts: path of the file of prompts.
        results: file of results.
        ask: default options of all prompts; see `read_prompts`.
        model: model name, which is part of each prompt's key; see `read_prompts`.

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
        """Yield the requests of the prompts without a completion in the result file. The prompt file is read lazily."""
        unfinished = (item for item in self._items() if not self._results.is_finished(item))
        for position, item in enumerate(unfinished):
            self._running[position] = item
            yield item.request

    def take(self, position: int, result: Result) -> int:
        """Write the result of a request; return the index of its prompt.

        `position` is the position of the request among those that `requests` yielded.
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
