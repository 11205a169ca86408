"""A run rendered as a text completion, or as its chunks."""

from collections.abc import Sequence
from typing import Any

from helexa.core.wire.openai_completions import Completion, CompletionChoice, CompletionLogprobs
from helexa.core.wire.usage import Usage
from helexa.neuron.events import Finished, OutputEvent, Started, TextDelta, TokenLogprob
from helexa.neuron.routes.projector import OpenAIProjector


class CompletionProjector(OpenAIProjector):
    """Renders a run as a text completion, or as its chunks.

    Args:
        echo: what each continuation begins with.
    """

    id_prefix = "cmpl"

    def __init__(
        self, model: str, *, choices: int = 1, echo: str = "", id: str | None = None, created: int | None = None
    ) -> None:
        super().__init__(model, choices=choices, id=id, created=created)
        self._echo = echo
        self._told = [0] * choices  # characters that tokens with log-probabilities stand for

    def chunk(self, choice: int, event: Started | OutputEvent | Finished) -> Completion | None:
        """The chunk that says so of a continuation."""
        match event:
            case Started() if self._echo:
                return self._completion([_choice(choice, self._echo)])
            case TextDelta(text, logprobs):
                return self._completion([_choice(choice, text, self._logprobs(choice, logprobs))])
            case Finished():
                return self._completion([_choice(choice, "", finish_reason=event.reason)])
            case _:
                return None

    def usage_chunk(self, usage: Usage) -> Completion:
        """The chunk that carries the usage and no choices."""
        return {**self._completion([]), "usage": usage}

    def choice(self, index: int, events: Sequence[OutputEvent], end: Finished) -> CompletionChoice:
        """A whole continuation."""
        deltas = [event for event in events if isinstance(event, TextDelta)]
        text = "".join([self._echo, *(delta.text for delta in deltas)])
        logprobs = self._logprobs(index, [token for delta in deltas for token in delta.logprobs])
        return _choice(index, text, logprobs, end.reason)

    def whole(self, choices: Sequence[Any], usage: Usage) -> Completion:
        """The text completion."""
        return {**self._completion(list(choices)), "usage": usage}

    def _logprobs(self, choice: int, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not tokens:
            return None
        told = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            told["tokens"].append(token.token)
            told["token_logprobs"].append(token.logprob)
            # Tokens that read alike, halves of characters as a rule, have the likeliest one's.
            alike = [(name, logprob) for name, _, logprob in reversed(token.top)]
            told["top_logprobs"].append({token.token: token.logprob, **dict(alike)})
            told["text_offset"].append(self._told[choice])
            self._told[choice] += len(token.token)
        return told

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices)


def _choice(
    index: int, text: str, logprobs: CompletionLogprobs | None = None, finish_reason: str | None = None
) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)
