"""Assign tokens' log-probabilities to the chunks of text they form."""

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.output_events import TokenLogprob
from helexa.neuron.text.tokenizer import TextOffsets, Tokenizer


class TokenLogprobs:
    """Buffers log-probabilities until the text of their tokens is sent."""

    def __init__(self, tokenizer: Tokenizer, *, complete: bool = False) -> None:
        self._tokenizer = tokenizer
        self._complete = complete  # whether to also report tokens that have no text in the answer
        self._waiting: list[TokenLogprob] = []
        self._offsets = TextOffsets()

    def add(self, token: int, logprob: Logprob, *, last: bool = False) -> None:
        """Add the log-probability of the next generated token to the buffer.

        Args:
            last: whether the token ends the answer. An incomplete UTF-8 character before this token has become U+FFFD
                in the text.
        """
        if last:
            self._offsets.end_text()
        self._waiting.append(self.with_text(token, logprob, self._offsets.push(self._tokenizer.token_bytes(token))))

    def with_text(self, token: int, logprob: Logprob, offset: int = 0) -> TokenLogprob:
        """Return text, bytes and log-probability of `token`, and of the likeliest tokens.

        Args:
            logprob: log-probability of the token, and of each of the most likely token ids at its position.
        """
        chosen, likeliest = logprob
        top = tuple((*self._spelled(alternative), value) for alternative, value in likeliest)
        return TokenLogprob(*self._spelled(token), chosen, top, offset)

    def take_all(self) -> tuple[TokenLogprob, ...]:
        """Return all buffered log-probabilities and clear the buffer."""
        entries, self._waiting = tuple(self._waiting), []
        return entries

    def clear(self) -> None:
        """Discard the buffered log-probabilities, because their tokens are not text."""
        self._waiting.clear()

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """Remove and return the log-probabilities of the tokens of `text`.

        The buffer may begin with tokens that have no text in the answer. If this object is `complete`, their
        log-probabilities are returned, too; otherwise they are dropped. If no tokens in the buffer match `text`, for
        example after an invalid character, all buffered log-probabilities are returned.
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
