"""Reads a model's vocabulary in the form that grammars need: the bytes of every token."""

from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from helexa.core.errors import HelexaError


class _Vocabulary:
    """A model's vocabulary with the tokenizer interface that llguidance requires."""

    def __init__(self, model: Path, width: int) -> None:
        from helexa.neuron.text.model_text import ModelText  # slow import that most engines never need

        tokenizer = ModelText.open(model).tokenizer
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token, skip_special=False) for token in range(width)]
        self.ends = sorted(end for end in tokenizer.eos_ids if end < width)
        special = {token for token in range(width) if self.tokens[token] and not tokenizer.token_bytes(token)}
        self.special_token_ids = sorted(special.union(self.ends))  # end tokens never occur in text
        if not self.ends:
            raise HelexaError("the model's vocabulary has no token that ends an answer, which a grammar needs")
        self.eos_token_id = self.ends[0]
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), parse_special=False)


def read_vocabulary(model: Path, width: int) -> LLTokenizer:
    """Return the vocabulary of the model in `model`, a file or folder, as a tokenizer for llguidance.

    Args:
        width: number of logits per row. The vocabulary is padded to this number of tokens.

    Raises:
        HelexaError: the vocabulary is missing, or has no end token.
    """
    vocabulary = _Vocabulary(model, width)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=width, eos_token=vocabulary.ends)
    vocabulary.tokens.clear()  # the tokenizer has a copy
    return tokenizer
