"""Runs the prompts of a file whose completions are not yet in the result file, and writes the results."""

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
    """How many prompts of a file were completed, failed, or did not have to run again.

    Attributes:
        finished: number of prompts that were completed in this run.
        failed: number of prompts that failed in this run. The next run repeats them.
        kept: number of prompts that were already completed in earlier runs.
    """

    finished: int = 0
    failed: int = 0
    kept: int = 0


class FileRun:
    """One run over a file of prompts. It skips the prompts that an earlier run completed.

    Args:
        prompts: path of the file of prompts.
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
        """Write the result of a request to the result file, and return the index of the prompt in the prompt file.

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
