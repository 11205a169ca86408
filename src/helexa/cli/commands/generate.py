"""`helexa generate`: answers to one prompt or to a file of prompts."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators

from helexa.cli.conversation import Form, print_answers, prompt_text, report
from helexa.cli.flags_and_completion import (
    AsJson,
    AskedModel,
    ModelName,
    Quiet,
    SamplingFlags,
    Switch,
    System,
    TargetFlags,
    Think,
    Verbose,
)
from helexa.cli.model_loading_and_download_bar import load_model
from helexa.cli.terminal_output_and_errors import USAGE, CommandError, Progress, json_text, note
from helexa.generation.background_event_loop import BlockingCaller, across, blocking_each
from helexa.generation.batch_file import Item, read_prompts, result_record
from helexa.generation.completion import Completion
from helexa.generation.errors import GenerationError
from helexa.generation.model import Model
from helexa.generation.options import AskOptions
from helexa.generation.request import AnswerSchema, Ask, Request, image_part
from helexa.generation.run_requests import Result


@dataclass
class BatchProgress:
    """Counts the completed and failed prompts of a batch.

    If `progress` is set, the number of answered prompts is shown on stderr.
    """

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


def check_files(prompts: str, output: Path | None) -> None:
    """Check the file of prompts and the path of results before a model loads.

    Raises:
        CommandError: `prompts` is not `-` and cannot be read, `output` is a folder, or its folder does not exist.
    """
    if prompts != "-":
        try:
            with Path(prompts).open("rb"):
                pass
        except OSError as error:
            problem = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror).lower()
            raise CommandError(f"{prompts}: {problem}; name a file with --prompts", USAGE) from None
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        problem = "is a folder" if output.is_dir() else f"the folder {output.parent} does not exist"
        raise CommandError(f"{output}: {problem}; name another file with --output", USAGE)


def answer_file(
    model: Model, prompts: str, output: Path | None, ask: Ask, *, parallel: int | None, stats: bool, quiet: bool
) -> int:
    """Generate responses to the prompts in a file. Return 1 if a prompt failed, or 0.

    Args:
        prompts: path of the file of prompts, or `-` for stdin.
        output: path of the file of results, or None for stdout. Prompts that the file already answers are skipped.
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
        note(f"failed prompts: {counts.failed}; the errors are in their result lines")
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
    """Yield the path of the file of prompts.

    If `prompts` is `-`, copy stdin to a temporary file first.
    """
    if prompts != "-":
        yield Path(prompts)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stdin")  # error messages about a prompt name this file
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]


def generate(
    model_or_prompt: Annotated[ModelName | None, Parameter(name="MODEL")] = None,
    prompt: str | None = None,
    /,
    *,
    model: AskedModel = None,
    file: Annotated[list[Path] | None, Parameter(alias="-f", negative="")] = None,
    image: Annotated[list[str] | None, Parameter(alias="-i", negative="")] = None,
    system: System = None,
    n: Annotated[Count, Parameter(alias="-n")] = 1,
    prompts: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    parallel: Count | None = None,
    schema: str | None = None,
    think: Think = None,
    as_json: AsJson = False,
    as_jsonl: Annotated[bool, Parameter(name="--jsonl", negative="")] = False,
    no_stream: Switch = False,
    stats: Switch = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    target_flags: TargetFlags = TargetFlags(),  # noqa: B008
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
) -> int:
    """Answer a prompt, or many. Answers go to stdout, all messages go to stderr.

    `helexa generate "PROMPT"` asks the default model, `helexa generate MODEL "PROMPT"` the given model. Text piped in
    is appended to the prompt, or is the prompt.

    Args:
        model_or_prompt: Model to ask; the prompt, if no other follows.
        prompt: Prompt.
        model: Model to ask, else HELEXA_MODEL, else the first loaded one, else helexa/small.
        file: A text file to append to the prompt. May be given several times.
        image: An image file, or the URL of one, for a model that sees images. May be given several times.
        system: System prompt.
        n: Number of answers.
        prompts: A file of prompts, or - for stdin: each line is a text in JSON, a list of messages, or an object with
            `prompt` or `messages`, an optional `id`, and fields such as `temperature` or `images`.
        output: File for the answers to --prompts, else stdout. Prompts that the file already answers are skipped, so
            interrupted runs resume.
        parallel: Number of concurrent requests, else the target's default; also set by HELEXA_NUM_PARALLEL.
        schema: A JSON Schema that constrains answers, or a file that contains it.
        think: Whether the model reasons before it answers, else the model's default.
        as_json: Print the answer with its metadata as JSON; several answers as a list.
        as_jsonl: Print each answer with its metadata as one line of JSON.
        no_stream: Print the answer when it is complete.
        stats: Print token counts and durations on stderr.
        quiet: Print only errors on stderr.
        verbose: Print where the model runs on stderr.
    """
    if prompt is None and model_or_prompt is not None:
        model_or_prompt, prompt = None, model_or_prompt
    if model_or_prompt is not None and model is not None:
        raise CommandError("the model is given twice: before the prompt, and by --model; leave out one of them", USAGE)
    if as_json and as_jsonl:
        raise CommandError("--json and --jsonl exclude each other; choose one", USAGE)
    options: AskOptions = {"sampling": sampling, "system": system, "schema": _schema(schema), "think": think}
    name = model or model_or_prompt
    if prompts is not None:
        if prompt is not None or file or image or n > 1 or as_json:
            raise CommandError(
                "--prompts cannot be combined with a PROMPT, --file, --image, -n or --json; leave them out", USAGE
            )
        check_files(prompts, output)
        ready, _ = load_model(target_flags, name, quiet=quiet, verbose=verbose)
        ask = Ask(sampling, system, AnswerSchema.from_schema(_schema(schema)), think)
        return answer_file(ready, prompts, output, ask, parallel=parallel, stats=stats, quiet=quiet)
    if output is not None or parallel is not None:
        raise CommandError("--output and --parallel need --prompts; add --prompts FILE, or leave them out", USAGE)
    options["images"] = image
    text = prompt_text(prompt, file or ())
    for one in image or ():
        image_part(one)  # Raise an error for an invalid image now, before a model is downloaded.
    ready, _ = load_model(target_flags, name, quiet=quiet, verbose=verbose)
    form: Form = "json" if as_json else "jsonl" if as_jsonl else "text"
    answers = print_answers(ready, text, options, n=n, form=form, stream=not no_stream)
    report(answers, stats=stats, quiet=quiet)
    return 0


def _schema(text: str | None) -> dict[str, Any] | None:
    """Return the JSON Schema in `text`, or in the file named `text`."""
    if text is None:
        return None
    where = "--schema"
    if not text.lstrip().startswith("{"):
        where = f"--schema {text}"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or "is not a text file"
            raise CommandError(f"{where}: {problem}; give a JSON Schema or a file with one", USAGE) from None
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(
            f"{where} is not valid JSON: {error}; give a JSON Schema or a file with one", USAGE
        ) from None
    if not isinstance(schema, dict):
        raise CommandError(f"{where} is not a JSON object; a schema begins with {{", USAGE)
    return schema
