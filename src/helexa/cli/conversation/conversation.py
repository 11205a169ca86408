"""A conversation with a model: its messages, requests to the model, and storage in a file."""

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

Content = str | list[dict[str, Any]]
"""The content of a message: a text, or a list of image and text parts."""

_LARGEST_BYTES = 64 << 20


class Conversation:
    """The messages of a conversation so far, and the settings for its next request.

    Attributes:
        model: the model.
        system: the system prompt, or None.
        sampling: sampling options.
        think: whether the model reasons before its response. None selects the model's default.
        images: content parts of the images that the next message will contain.
        last: the last response. None before the first response, and if the last response is incomplete.
    """

    def __init__(self, model: Model, system: str | None, sampling: Sampling, think: bool | None = None) -> None:
        self.model = model
        self.system = system
        self.sampling = sampling
        self.think = think
        self.images: list[dict[str, Any]] = []
        self.last: Completion | None = None
        self._turns: list[dict[str, Any]] = []
        self._last_prompt: Content | None = None
        self._answered = False

    def ask(self, message: Content) -> Generator[Delta, None, None]:
        """Send a message of the user, and yield the chunks of the response without control characters.

        If `message` is a text, the images in `images` precede it.

        Closing the generator cancels the request. The text received so far stays in the conversation. If no text was
        received, the user message is removed from the conversation.

        Raises:
            HelexaError: the request failed, or the response is incomplete.
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
        """Remove the last user message and the response to it, and return the content of the message.

        Return None if the conversation has no user message.
        """
        if self._answered:
            del self._turns[-2:]
            self._answered = False
        return self._last_prompt

    def clear(self) -> None:
        """Remove all messages except the system prompt."""
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
        """Replace the messages and the system prompt by those in a file, and return the number of messages.

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
    raise CommandError(f"{path} does not contain a conversation")


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
