"""A model's vocabulary as grammars need it: the bytes of every token."""

from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from helexa.core.errors import HelexaError


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, model: Path, width: int) -> None:
        from helexa.neuron.text.model_text import ModelText  # most engines never need it

        tokenizer = ModelText.open(model).tokenizer
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token, skip_special=False) for token in range(width)]
        self.ends = sorted(end for end in tokenizer.eos_ids if end < width)
        special = {token for token in range(width) if self.tokens[token] and not tokenizer.token_bytes(token)}
        self.special_token_ids = sorted(special.union(self.ends))  # no end stands in a text, whatever files call it
        if not self.ends:
            raise HelexaError("the model's vocabulary has no token that ends an answer, which a grammar needs")
        self.eos_token_id = self.ends[0]
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), parse_special=False)


def read_vocabulary(model: Path, width: int) -> LLTokenizer:
    """The vocabulary of the model at this path, made as wide as its logits.

    Raises:
        HelexaError: there is none, or none that grammars can use.
    """
    vocabulary = _Vocabulary(model, width)
    read = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=width, eos_token=vocabulary.ends)
    vocabulary.tokens.clear()  # it has its own
    return read
