"""Report the log-probabilities of an answer's tokens together with the text of the tokens."""

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.events import TokenLogprob
from helexa.neuron.text.tokenizers.tokenizer import Tokenizer


class TokenLogprobs:
    """Holds log-probabilities of the answer's tokens until the text of the tokens is reported.

    Args:
        tokenizer: tokenizer of the model.
        complete: report every token, also tokens without text in the answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, complete: bool = False) -> None:
        self._tokenizer = tokenizer
        self._complete = complete
        self._waiting: list[TokenLogprob] = []

    def add(self, token: int, logprob: Logprob) -> None:
        """Add the log-probability of the next token."""
        self._waiting.append(self.with_text(token, logprob))

    def with_text(self, token: int, logprob: Logprob) -> TokenLogprob:
        """Return the log-probability of a token, with the token's text and bytes."""
        chosen, likeliest = logprob
        top = tuple((*self._spelled(alternative), value) for alternative, value in likeliest)
        return TokenLogprob(*self._spelled(token), chosen, top)

    def take_all(self) -> tuple[TokenLogprob, ...]:
        """Return all held log-probabilities and clear them."""
        entries, self._waiting = tuple(self._waiting), []
        return entries

    def clear(self) -> None:
        """Discard the held log-probabilities, because their tokens do not belong to the answer's text."""
        self._waiting.clear()

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the tokens that form `text`, and hold them no longer.

        `text` is the next text that is reported to the client. Tokens before `text` have no text in the answer; their
        log-probabilities are dropped unless `complete`. If no tokens match `text`, because a character is broken or a
        token is cut in two, all held log-probabilities are returned.
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
        matching, self._waiting = tuple(self._waiting[first:last]), self._waiting[last:]
        return matching

    def _spelled(self, token: int) -> tuple[str, bytes]:
        spelled = self._tokenizer.token_bytes(token, skip_special=False)
        return spelled.decode("utf-8", "replace"), spelled
