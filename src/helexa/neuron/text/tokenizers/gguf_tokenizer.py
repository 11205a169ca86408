"""Build the tokenizer that a GGUF file's metadata describes."""

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models

from helexa.core.errors import ModelFileError
from helexa.neuron.text.tokenizers.backend_errors import backend_errors
from helexa.neuron.text.tokenizers.gguf_vocabulary import GgufVocabulary, gguf_value
from helexa.neuron.text.tokenizers.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from helexa.neuron.text.tokenizers.sentencepiece import merges_from_scores, sentencepiece_backend
from helexa.neuron.text.tokenizers.wordpiece import wordpiece_backend

_log = logging.getLogger("helexa.neuron.text")

_MODELS = ("bert", "gemma4", "gpt2", "llama")
_END_KINDS = ("eos", "eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")


class GgufTokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys of a GGUF file's metadata describe. All keys are validated.

    Attributes:
        backend: tokenizer of the `tokenizers` library. Control tokens and the unknown token are special tokens.
            User-defined tokens are added tokens.
        bos_id: id of the beginning-of-sequence token, or None if the file has none.
        eos_id: id of the end-of-sequence token, or None if the file has none.
        end_ids: ids of all tokens in the file that end a sequence, a turn, a message or an infill.
        add_bos: whether a prompt begins with `bos_id`.
        add_eos: whether a prompt ends with `eos_id`.

    Raises:
        ModelFileError: the type of tokenizer is not supported, or the value of a key is invalid.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = gguf_value(metadata, "model", str)
        if model not in _MODELS:
            raise ModelFileError(f"tokenizer model '{model[:80]}' is not supported, only {', '.join(_MODELS)}")
        rules = _rules(metadata) if model == "gpt2" else None
        vocabulary = GgufVocabulary(metadata)
        if rules is not None:
            self.backend, add_bos = _byte_level_backend(vocabulary, rules), rules.add_bos
        elif model == "bert":
            self.backend, add_bos = wordpiece_backend(vocabulary), False
        else:
            merges = merges_from_scores(vocabulary) if model == "llama" else vocabulary.merges()
            space_prefix = vocabulary.flag("add_space_prefix", model == "llama")
            self.backend, add_bos = sentencepiece_backend(vocabulary, merges, space_prefix), True
        self.backend.add_tokens(vocabulary.added_tokens())
        self.bos_id = vocabulary.token_id("bos")
        self.eos_id = vocabulary.token_id("eos")
        ends = (vocabulary.token_id(kind) for kind in _END_KINDS)
        self.end_ids = frozenset(end for end in ends if end is not None)
        self.add_bos = vocabulary.flag("add_bos_token", add_bos)
        self.add_eos = vocabulary.flag("add_eos_token", False)


def _rules(metadata: Mapping[str, Any]) -> PreTokenizer:
    if "tokenizer.ggml.pre" not in metadata:
        _log.warning("the file names no pre-tokenizer: using llama.cpp's default rules, which may not match the model")
        return PRE_TOKENIZERS["default"]
    pre = gguf_value(metadata, "pre", str)
    if pre not in PRE_TOKENIZERS:
        raise ModelFileError(f"pre-tokenizer '{pre[:80]}' is not supported, only {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[pre]


def _byte_level_backend(vocabulary: GgufVocabulary, rules: PreTokenizer) -> Tokenizer:
    merges = vocabulary.merges()
    with backend_errors("tokenizer.ggml.merges do not fit the vocabulary"):
        backend = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=rules.ignore_merges))
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer
    backend.pre_tokenizer = rules.split
    backend.decoder = decoders.ByteLevel()
    return backend
