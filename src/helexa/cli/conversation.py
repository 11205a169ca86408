"""Conversations on the terminal, their files, and single prompts."""

import json
import select
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from helexa.cli.terminal_output_and_errors import USAGE, CommandError, json_text, note, printable
from helexa.core.sampling import Sampling
from helexa.generation.batch_file import completion_record
from helexa.generation.completion import Completion, Delta
from helexa.generation.model import Model, Stream
from helexa.generation.options import AskOptions

Content = str | list[dict[str, Any]]  # the content of a message: a text, or a list of image and text parts

_LARGEST_BYTES = 64 << 20

_MOST_CHARACTERS = 16 * 1024 * 1024


class Conversation:
    """The messages of a conversation so far, and the settings for its next request."""

    def __init__(self, model: Model, system: str | None, sampling: Sampling, think: bool | None = None) -> None:
        self.model = model
        self.system = system  # the system prompt, or None
        self.sampling = sampling  # sampling options
        self.think = think  # whether the model reasons before its response. None selects the model's default.
        self.images: list[dict[str, Any]] = []  # content parts of the images that the next message will contain
        # The last response. None before the first response, and if the last response is incomplete.
        self.last: Completion | None = None
        self._turns: list[dict[str, Any]] = []
        self._last_prompt: Content | None = None
        self._answered = False

    def ask(self, message: Content) -> Generator[Delta, None, None]:
        """Send a message and yield the response without control characters.

        If `message` is a text, the images in `images` precede it, and `images` is emptied.

        Closing the generator cancels the request. The text received so far stays in the conversation. If no text was
        received, the user message is removed from the conversation.

        Raises:
            HelexaError or a subclass: the request failed, or the response is incomplete.
        """
        if self.images and isinstance(message, str):
            message = [*self.images, {"type": "text", "text": message}]
            self.images = []
        self._last_prompt = message
        self._turns.append({"role": "user", "content": message})
        received: list[str] = []
        stream = self.model.stream(self._turns, system=self.system, sampling=self.sampling, think=self.think)
        try:
            with closing(stream):
                for delta in stream:
                    if not delta.thought:
                        received.append(delta.text)
                    yield Delta(printable(delta.text), delta.thought)
        finally:
            self.last = stream.completion
            completion = self.last.text if self.last else "".join(received)
            self._answered = bool(completion)
            if completion:
                self._turns.append({"role": "assistant", "content": completion})
            else:
                self._turns.pop()

    def take_back(self) -> Content | None:
        """Remove the last user message and its response, and return the message's content.

        If the last message got no response, `ask` has removed it already, and only its content is returned. Return None
        before the first message, after `clear`, and after `load` of a file that does not end with a response.
        """
        if self._answered:
            del self._turns[-2:]
            self._answered = False
        return self._last_prompt

    def clear(self) -> None:
        """Remove all messages and attached images, but keep the system prompt."""
        self.images = []
        self._turns.clear()
        self._last_prompt = None
        self._answered = False

    def save(self, path: Path) -> int:
        """Write the conversation to a file as JSON, and return the number of messages.

        An existing file is overwritten only if it contains a conversation.

        Raises:
            CommandError: the file exists and does not contain a conversation.
            OSError: the file cannot be written.
        """
        if path.exists():
            _read(path)
        content = {"system": self.system, "messages": self._turns}
        partial = path.with_name(f".{path.name}.new")
        partial.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
        return len(self._turns)

    def load(self, path: Path) -> int:
        """Replace the messages and the system prompt with those in a file.

        Attached images are removed. Return the number of messages.

        Raises:
            CommandError: the file does not contain a conversation.
            OSError: the file cannot be read.
        """
        system, turns = _read(path)
        self.clear()
        self.system, self._turns = system, turns
        if len(turns) > 1 and turns[-2]["role"] == "user" and turns[-1]["role"] == "assistant":
            self._last_prompt, self._answered = turns[-2]["content"], True
        return len(turns)


def _read(path: Path) -> tuple[str | None, list[dict[str, Any]]]:
    with path.open("rb") as file:
        text = file.read(_LARGEST_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    match content:
        case {"system": str() | None as system, "messages": [*turns]} if all(map(_is_turn, turns)):
            return system, turns
    raise CommandError(f"{path} does not contain a conversation; name a file that /save wrote")


def _is_turn(turn: object) -> bool:
    match turn:
        case {"role": "user" | "assistant", "content": str()}:
            return True
        case {"role": "user", "content": [*parts]}:
            return all(map(_is_part, parts))
    return False


def _is_part(part: object) -> bool:
    match part:
        case {"type": "text", "text": str()} | {"type": "image_url", "image_url": {"url": str()}}:
            return True
    return False


def prompt_text(prompt: str | None, files: Sequence[Path] = ()) -> str:
    """Return `prompt`, followed by the texts of `files` and the text piped to stdin.

    Empty lines separate the texts. Without `prompt`, `files` and piped text, read the prompt from the terminal.

    Raises:
        CommandError: there is no text, a file cannot be read, or a file or the piped text is too long.
    """
    parts = [prompt or "", *map(_content, files)]
    if not sys.stdin.isatty():
        if (prompt or files) and not _has_input():
            note("waiting for stdin to end; if no text is piped in, add </dev/null")
        parts.append(_bounded(sys.stdin.read(_MOST_CHARACTERS + 1), "the text piped in"))
    elif prompt is None and not files:
        note("type the prompt; Ctrl-D on a line of its own ends it")
        parts.append(sys.stdin.read())
    text = "\n\n".join(part.strip("\r\n") for part in parts if part.strip())
    if not text:
        raise CommandError("nothing to ask: give a PROMPT or pipe in some text", USAGE)
    return text


def _has_input(seconds: float = 1) -> bool:
    """Wait at most `seconds` for stdin. Return whether it has text or has ended.

    Some job runners leave stdin open without ever writing to it.
    """
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):  # stdin has no file descriptor that `select` can check
        return True


def _content(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return _bounded(file.read(_MOST_CHARACTERS + 1), str(path))
    except UnicodeDecodeError:
        raise CommandError(f"{path} is not UTF-8 text; name a text file, or an image with --image", USAGE) from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}; name a text file that you can read", USAGE) from None


def _bounded(text: str, source: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        raise CommandError(
            f"{source} has more than {_MOST_CHARACTERS} characters, the limit of a prompt; shorten the text"
        )
    return text


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
    """Print notes about the responses of a conversation on stderr.

    Args:
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
