"""Prints the responses to a prompt to stdout as text or JSON, and their statistics to stderr."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Literal

from helexa.cli.json_lines import json_text
from helexa.cli.terminal import note, printable
from helexa.generation.completion import Completion
from helexa.generation.files.result_file import completion_record
from helexa.generation.model import AskOptions, Model, Stream

Form = Literal["text", "json", "jsonl"]


def print_answers(
    model: Model, prompt: str, options: AskOptions, *, n: int = 1, form: Form = "text", stream: bool = True
) -> Sequence[Completion]:
    """Request `n` responses to a prompt, print them to stdout, and return them.

    If `stream` is set and only one response is requested as text, the text is printed while it is generated. In all
    other cases, the responses are printed when they are complete.
    """
    if form == "text" and n == 1 and stream:
        return _print_stream(model.stream(prompt, **options))
    answers = model.generate(prompt, n=n, **options).choices
    records = [completion_record(replace(completion, others=())) for completion in answers]
    match form:
        case "json":
            print(json_text(records if n > 1 else records[0], indent=2))
        case "jsonl":
            for record in records:
                print(json_text(record))
        case "text":
            print("\n\n".join(printable(completion.text).strip("\n") for completion in answers))
    return answers


def report(answers: Sequence[Completion], *, stats: bool, quiet: bool) -> None:
    """Print notes about responses on stderr.

    Args:
        answers: the responses.
        stats: whether to print the token counts and durations of each response.
        quiet: whether to omit the note about responses that reached their token limit.
    """
    if not quiet and any(completion.finish_reason == "length" for completion in answers):
        note("the answer stopped at the token limit")
    for completion in answers if stats else ():
        note(stats_line(completion))


def stats_line(completion: Completion) -> str:
    """Return the token counts and durations of a response as one line of text."""
    usage, times = completion.usage, completion.timings
    cached = f" ({usage.cached} from the cache)" if usage.cached else ""
    columns = [f"prompt {usage.prompt} tokens{cached}", f"answer {usage.completion} tokens"]
    columns.append(f"first after {times.ttft_s:.2f} s")
    if completion.tok_s:
        columns.append(f"{completion.tok_s:.1f} tokens/s")
    columns.append(f"seed {completion.seed}")
    if completion.device:
        columns.append(f"{completion.device} in {completion.dtype}")
    return printable(", ".join(columns))


def _print_stream(stream: Stream) -> Sequence[Completion]:
    """Print a streamed response without its reasoning, and return its completion."""
    end = ""
    try:
        with closing(stream):
            for delta in stream:
                if not delta.thought:
                    text = printable(delta.text)
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    end = text or end
    finally:
        if end and not end.endswith("\n"):
            print()
    return (stream.completion,) if stream.completion else ()
