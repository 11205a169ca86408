"""`helexa generate`: generate responses to one prompt or to a file of prompts."""

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators

from helexa.cli.commands.completion import ModelName
from helexa.cli.conversation.answer_printer import Form, print_answers, report
from helexa.cli.failure import USAGE, CommandError
from helexa.cli.flags import Quiet, SamplingFlags, Switch, TargetFlags, Verbose
from helexa.cli.model_loading import load_model
from helexa.cli.prompt_input import prompt_text
from helexa.generation.model import AskOptions
from helexa.generation.request import Ask
from helexa.generation.schema import AnswerSchema

Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]


def generate(
    model_or_prompt: Annotated[ModelName | None, Parameter(name="MODEL")] = None,
    prompt: str | None = None,
    /,
    *,
    model: Annotated[ModelName | None, Parameter(alias="-m")] = None,
    file: Annotated[list[Path] | None, Parameter(alias="-f", negative="")] = None,
    image: Annotated[list[str] | None, Parameter(alias="-i", negative="")] = None,
    system: Annotated[str | None, Parameter(alias="-s")] = None,
    n: Annotated[Count, Parameter(alias="-n")] = 1,
    prompts: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    parallel: Count | None = None,
    schema: str | None = None,
    think: bool | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
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
        raise CommandError("the model is given twice: before the prompt, and by --model", USAGE)
    if as_json and as_jsonl:
        raise CommandError("--json and --jsonl exclude each other; choose one", USAGE)
    options: AskOptions = {"sampling": sampling.sampling(), "system": system, "schema": _schema(schema), "think": think}
    name = model or model_or_prompt
    if prompts is not None:
        from helexa.cli.commands.batch import answer_file

        if prompt is not None or file or image or n > 1 or as_json:
            raise CommandError("--prompts reads prompts from a file; give no other prompt or output option", USAGE)
        ready, _ = load_model(target_flags, name, quiet=quiet, verbose=verbose)
        ask = Ask(sampling.sampling(), system, AnswerSchema.from_schema(_schema(schema)), think)
        return answer_file(ready, prompts, output, ask, parallel=parallel, stats=stats, quiet=quiet)
    if output is not None or parallel is not None:
        raise CommandError("--output and --parallel need --prompts", USAGE)
    options["images"] = image
    text = prompt_text(prompt, file or ())
    ready, _ = load_model(target_flags, name, quiet=quiet, verbose=verbose)
    form: Form = "json" if as_json else "jsonl" if as_jsonl else "text"
    answers = print_answers(ready, text, options, n=n, form=form, stream=not no_stream)
    report(answers, stats=stats, quiet=quiet)
    return 0


def _schema(text: str | None) -> dict[str, Any] | None:
    """Return the parsed JSON Schema that `text` contains, or that the file named `text` contains."""
    if text is None:
        return None
    where = "--schema"
    if not text.lstrip().startswith("{"):
        where = text
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CommandError(f"{where}: {getattr(error, 'strerror', None) or 'is not a text file'}", USAGE) from None
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{where}: is not JSON: {error}", USAGE) from None
    if not isinstance(schema, dict):
        raise CommandError(f"{where}: is not a JSON object", USAGE)
    return schema
