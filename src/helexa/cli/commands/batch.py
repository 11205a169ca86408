"""`helexa generate --prompts`: generate responses to a file of prompts, and write them as JSON lines."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from helexa.cli.failure import USAGE, CommandError
from helexa.cli.json_lines import json_text
from helexa.cli.terminal import Progress, note
from helexa.generation.answering import Result
from helexa.generation.background import BlockingCaller, across, blocking_each
from helexa.generation.completion import Completion
from helexa.generation.errors import GenerationError
from helexa.generation.files.prompt_file import Item, read_prompts
from helexa.generation.files.result_file import result_record
from helexa.generation.model import AskOptions, Model
from helexa.generation.request import Ask, Request


@dataclass
class BatchProgress:
    """Counts the completed and failed prompts of a batch. If `progress` is set, it shows the count on stderr."""

    progress: Progress | None
    started: float = field(default_factory=time.monotonic)
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def count(self, _: int, result: Result) -> None:
        """Add the result of one prompt (a completion or an error) to the counts."""
        if isinstance(result, Completion):
            self.answered += 1
            self.prompt_tokens += result.usage.prompt
            self.answer_tokens += result.usage.completion
        else:
            self.failed += 1
        if self.progress is not None:
            self.progress.show(f"{self.answered} prompts answered")

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        counts = f"{self.prompt_tokens} tokens of prompts, {self.answer_tokens} of answers"
        return f"{self.answered} answers in {seconds:.1f} s, {counts}, {self.answer_tokens / seconds:.1f} tokens/s"


def answer_file(
    model: Model, prompts: str, output: Path | None, ask: Ask, *, parallel: int | None, stats: bool, quiet: bool
) -> int:
    """Generate responses to the prompts in a file, write them to `output` or stdout, and return the exit code.

    Args:
        model: the model.
        prompts: path of the file of prompts, or `-` for stdin.
        output: path of the file of results, or None for stdout.
        ask: default options of all prompts.
        parallel: number of concurrent requests, or None for a default.
        stats: whether to print token counts and durations on stderr.
        quiet: whether to print only errors on stderr.

    Raises:
        HelexaError: the run cannot continue. The results so far are already written.
    """
    drawn = not quiet and sys.stderr.isatty() and (output is not None or not sys.stdout.isatty())
    with _file_of(prompts) as path, Progress() if drawn else nullcontext() as progress:
        counts = BatchProgress(progress)
        if output is None:
            _print_results(model, path, ask, parallel, counts)
        else:
            options: AskOptions = {"sampling": ask.sampling, "system": ask.system, "think": ask.think}
            if ask.schema is not None:
                options["schema"] = ask.schema.schema
            summary = model.batch_file(path, output, max_parallel=parallel, on_result=counts.count, **options)
            if summary.kept and not quiet:
                note(f"prompts already answered: {summary.kept}")
    if stats:
        note(str(counts))
    if counts.failed:
        note(f"failed prompts: {counts.failed}; their lines have the errors")
    return 1 if counts.failed else 0


def _print_results(model: Model, path: Path, ask: Ask, parallel: int | None, counts: BatchProgress) -> None:
    items: dict[int, Item] = {}

    def requests() -> Iterator[Request | GenerationError]:
        for item in read_prompts(path, ask):
            items[item.index] = item
            yield item.request

    with closing(blocking_each(across(BlockingCaller(), model.results(requests(), parallel)))) as results:
        for index, result in results:
            print(json_text(result_record(items.pop(index), result)), flush=True)
            counts.count(index, result)


@contextmanager
def _file_of(prompts: str) -> Iterator[Path]:
    """Yield the path of the file of prompts. If `prompts` is `-`, copy stdin to a temporary file first."""
    if prompts != "-":
        if not Path(prompts).is_file():
            raise CommandError(f"{prompts}: no such file", USAGE)
        yield Path(prompts)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stdin")  # the file name appears in errors
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path
