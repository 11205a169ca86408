"""The log-probabilities of an answer's tokens, told with the text that the tokens make."""

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.events import TokenLogprob
from helexa.neuron.text.tokenizers.tokenizer import Tokenizer


class TokenLogprobs:
    """Keeps those of tokens whose text has not been shown yet.

    Args:
        complete: tokens that were left out of the text are told, too.
    """

    def __init__(self, tokenizer: Tokenizer, *, complete: bool = False) -> None:
        self._tokenizer = tokenizer
        self._complete = complete
        self._waiting: list[TokenLogprob] = []

    def add(self, token: int, logprob: Logprob) -> None:
        """Take the next token's."""
        self._waiting.append(self.told(token, logprob))

    def told(self, token: int, logprob: Logprob) -> TokenLogprob:
        """Return the log-probability of a token, spelled."""
        chosen, likeliest = logprob
        top = tuple((*self._spelled(other), value) for other, value in likeliest)
        return TokenLogprob(*self._spelled(token), chosen, top)

    def rest(self) -> tuple[TokenLogprob, ...]:
        """Take all that wait."""
        rest, self._waiting = tuple(self._waiting), []
        return rest

    def clear(self) -> None:
        """What the tokens so far have said is no text."""
        self._waiting.clear()

    def of(self, text: str) -> tuple[TokenLogprob, ...]:
        """Take those of the tokens that make up `text`, the next that is shown.

        Tokens before them were left out of the text. Where no tokens make it up, because a character is broken or a
        token was cut in two, it is all that wait.
        """
        shown = text.encode()
        start = b"".join([token.bytes for token in self._waiting]).find(shown)
        first, last, at = 0, len(self._waiting), 0
        for index, token in enumerate(self._waiting if start >= 0 else ()):
            at += len(token.bytes)
            if at <= start:
                first = index + 1
            if at >= start + len(shown):
                last = index + 1
                break
        first = 0 if self._complete else first
        taken, self._waiting = tuple(self._waiting[first:last]), self._waiting[last:]
        return taken

    def _spelled(self, token: int) -> tuple[str, bytes]:
        spelled = self._tokenizer.token_bytes(token, skip_special=False)
        return spelled.decode("utf-8", "replace"), spelled
