"""A conversation with one model: messages, requests, and storage in a file."""

import json
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from helexa.cli.failure import CommandError
from helexa.cli.terminal import printable
from helexa.generation.completion import Completion, Delta
from helexa.generation.model import Model
from helexa.generation.sampling import Sampling

_LARGEST_BYTES = 64 << 20


class Conversation:
    """The messages so far and the settings of the next request.

    Attributes:
        model: the model.
        system: the system prompt, or None.
        sampling: sampling options.
        think: whether the model reasons before it answers; None selects the model's default.
        last: the last answer; None before the first answer and after a stopped answer.
    """

    def __init__(self, model: Model, system: str | None, sampling: Sampling, think: bool | None = None) -> None:
        self.model = model
        self.system = system
        self.sampling = sampling
        self.think = think
        self.last: Completion | None = None
        self._turns: list[dict[str, Any]] = []
        self._asked: str | None = None
        self._answered = False

    def ask(self, text: str) -> Generator[Delta, None, None]:
        """Yield the pieces of the answer to `text`, without control characters.

        Closing the generator stops the answer; the received part stays in the conversation. Without any received part,
        the question is removed.

        Raises:
            HelexaError: the request failed, or the answer is incomplete.
        """
        self._asked = text
        self._turns.append({"role": "user", "content": text})
        answer: list[str] = []
        stream = self.model.stream(self._turns, system=self.system, sampling=self.sampling, think=self.think)
        try:
            with closing(stream):
                for piece in stream:
                    if not piece.thought:
                        answer.append(piece.text)
                    yield Delta(printable(piece.text), piece.thought)
        finally:
            self.last = stream.completion
            said = self.last.text if self.last else "".join(answer)
            self._answered = bool(said)
            if said:
                self._turns.append({"role": "assistant", "content": said})
            else:
                self._turns.pop()

    def take_back(self) -> str | None:
        """Remove the last question and its answer; return the question, or None if there was none."""
        if self._answered:
            del self._turns[-2:]
            self._answered = False
        return self._asked

    def clear(self) -> None:
        """Remove all messages; the system prompt stays."""
        self._turns.clear()
        self._asked = None
        self._answered = False

    def save(self, path: Path) -> int:
        """Write the conversation to a file; return the number of its messages. An existing conversation is replaced.

        Raises:
            CommandError: the existing file is not a conversation.
            OSError: the file cannot be written.
        """
        if path.exists():
            _read(path)
        said = {"system": self.system, "messages": self._turns}
        partial = path.with_name(f".{path.name}.new")
        partial.write_text(json.dumps(said, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
        return len(self._turns)

    def load(self, path: Path) -> int:
        """Load a conversation from a file; return the number of its messages.

        Raises:
            CommandError: the file is not a conversation.
            OSError: the file cannot be read.
        """
        system, turns = _read(path)
        self.clear()
        self.system, self._turns = system, turns
        if len(turns) > 1 and turns[-2]["role"] == "user" and turns[-1]["role"] == "assistant":
            self._asked, self._answered = turns[-2]["content"], True
        return len(turns)


def _read(path: Path) -> tuple[str | None, list[dict[str, Any]]]:
    with path.open("rb") as file:
        text = file.read(_LARGEST_BYTES)
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    match said:
        case {"system": str() | None as system, "messages": [*turns]} if all(map(_is_turn, turns)):
            return system, turns
    raise CommandError(f"{path} holds no conversation")


def _is_turn(turn: object) -> bool:
    match turn:
        case {"role": "user" | "assistant", "content": str()}:
            return True
    return False
