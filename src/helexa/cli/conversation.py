"""A conversation with one model: its turns, how to ask for the next one, and what the last one cost."""

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from helexa.cli.gateway import Gateway
from helexa.cli.terminal import printable


class Piece(NamedTuple):
    """A bit of an answer; `thought` marks reasoning that is not part of the answer itself."""

    text: str
    thought: bool


@dataclass
class Stats:
    """What one answer took. Times are seconds on this side's clock; None is unknown."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    finish_reason: str | None = None

    def note_piece(self) -> None:
        """A piece has just arrived."""
        self.last = time.monotonic()
        self.first = self.first or self.last

    def note_usage(self, usage: dict[str, Any]) -> None:
        """The server has counted."""
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.answer_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None

    def __str__(self) -> str:
        words: list[str] = []
        if self.prompt_tokens is not None:
            cached = f" ({self.cached_tokens} from the cache)" if self.cached_tokens else ""
            words.append(f"prompt {self.prompt_tokens} tokens{cached}")
        if self.answer_tokens is not None:
            words.append(f"answer {self.answer_tokens} tokens")
        if self.first is not None and self.last is not None:
            words.append(f"first after {self.first - self.started:.2f} s")
            if self.answer_tokens and self.answer_tokens > 1 and self.last > self.first:
                words.append(f"{(self.answer_tokens - 1) / (self.last - self.first):.1f} tokens/s")
        return ", ".join(words) or "nothing was answered"


class Conversation:
    """The turns so far and the settings for the next.

    Attributes:
        model: id of the model that is asked.
        system: the system prompt, or None.
        stats: of the last answer, or None before the first.
    """

    def __init__(self, gateway: Gateway, model: str, system: str | None, options: dict[str, Any]) -> None:
        """`options` are further fields of every request, such as `temperature`."""
        self.gateway = gateway
        self.model = model
        self.system = system
        self.stats: Stats | None = None
        self._options = options
        self._turns: list[dict[str, str]] = []
        self._asked: str | None = None
        self._answered = False

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """The answer to `text`, piece by piece, harmless to print.

        Closing the generator stops the answer; what had arrived by then stays in the conversation. Without any
        answer the question is taken back.

        Raises:
            CommandError: the gateway refused, failed or went away.
        """
        self._asked = text
        self._turns.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        request = {"model": self.model, "messages": system + self._turns, **self._options}
        stats = self.stats = Stats()
        answer: list[str] = []
        try:
            with closing(self.gateway.chat(request)) as chunks:
                for chunk in chunks:
                    for piece in _pieces(chunk, stats):
                        if not piece.thought:
                            answer.append(piece.text)
                        yield piece._replace(text=printable(piece.text))
        finally:
            self._answered = bool(answer)
            if answer:
                self._turns.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._turns.pop()

    def take_back(self) -> str | None:
        """Forget the last question and its answer; returns the question, None when nothing was asked."""
        if self._answered:
            del self._turns[-2:]
            self._answered = False
        return self._asked

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self._turns.clear()
        self._asked = None
        self._answered = False


def _pieces(chunk: dict[str, Any], stats: Stats) -> Generator[Piece, None, None]:
    usage, choices = chunk.get("usage"), chunk.get("choices")
    if isinstance(usage, dict):
        stats.note_usage(usage)
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return
    reason, delta = choice.get("finish_reason"), choice.get("delta")
    if isinstance(reason, str):
        stats.finish_reason = reason
    if not isinstance(delta, dict):
        return
    for name, thought in (("reasoning_content", True), ("content", False)):
        text = delta.get(name)
        if isinstance(text, str) and text:
            stats.note_piece()
            yield Piece(text, thought)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None
