"""Each form of grammar with each kind of tokenizer: the decoded text is exactly what the grammar accepts."""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from helexa.neuron.engine.grammar_matcher import GrammarMatcher, Mask, read_vocabulary
from helexa.neuron.grammar import after_reasoning, for_choice, for_lark, for_regex, for_schema, for_tools
from helexa.neuron.grammar.grammar_check_and_rejection import PARSER_LIMITS
from helexa.neuron.parsers.reasoning import ReasoningMarks
from helexa.neuron.text.model_text import ModelText
from helexa.neuron.text.tokenizer import Detokenizer, Tokenizer
from neuron.parsers.piecewise_parsing import parse_pieces, parser
from neuron.text import multilingual
from nightly import cases, daily

WALKS = cases(2, 100, "HELEXA_TEST_WALKS")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "São Paulo", " leading space", "trailing space "]},
        "kind": {"const": "two  spaces, café"},
        "code": {"type": "string", "pattern": "^[A-Z]{2} [0-9]{1,3}$"},
        "note": {"type": "string", "maxLength": 5},
        "count": {"type": "integer"},
        "places": {"type": "array", "items": {"type": "object", "additionalProperties": False}, "maxItems": 2},
    },
    "required": ["city", "kind", "code", "note", "count", "places"],
    "additionalProperties": False,
}
CHOICES = [" leading", "positive", "positively", "two words", "世界", "tab\t"]
DECOMPOSED = "cafe\u0301 a\u030a"  # normalizers compose the accents
REGEX = r"( ?[a-z]{2,5}){2} [0-9]+\n  é?!"
TOOLS = {"look_up": SCHEMA, "now": {"type": "object", "properties": {}}}
MARKS = ReasoningMarks("<think>", "</think>")
THOUGHT = re.compile(r"<think>(?s:.*?)</think>\n{0,2}")


def _is_json(text: str, schema: Any = True) -> None:
    value = json.loads(text)
    assert isinstance(value, dict)
    jsonschema.validate(value, schema)
    assert text[0] == "{" and text[-1] == "}"


def _is_call(text: str) -> None:
    for kind, *fields in parse_pieces(parser("hermes", TOOLS), [text]):
        assert kind == "call", (kind, text)
        jsonschema.validate(json.loads(fields[1]), TOOLS[fields[0]])


def _matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def _is_choice(text: str) -> None:
    assert text in CHOICES


FORMS: dict[str, tuple[str, Callable[[str], None]]] = {
    "json_object": (for_schema({"type": "object"}), _is_json),
    "json_schema": (for_schema(SCHEMA), lambda text: _is_json(text, SCHEMA)),
    "choice": (for_choice(CHOICES), _is_choice),
    "forced choice": (for_choice(CHOICES[3:4]), _is_choice),
    "regex": (for_regex(REGEX), _matches(REGEX)),
    "lark": (for_lark('start: "a" (" b" | "  c")* NAME\nNAME: /[x-z ]{2}/'), _matches(r"a( b|  c)*[x-z ]{2}")),
    "forced tool": (for_tools("hermes", TOOLS, "look_up", False), _is_call),
    "required tool": (for_tools("hermes", TOOLS, "required", True, strict=["look_up"]), _is_call),
    "strict tool": (for_tools("hermes", TOOLS, "auto", True, strict=["look_up"]), lambda text: None),
    "reasoning": (
        after_reasoning(for_schema(SCHEMA), MARKS, begun=False),
        lambda text: _is_json(THOUGHT.sub("", text, count=1), SCHEMA),
    ),
}


class Writer:
    """Writes random texts that a grammar allows, with the calls of the engine: forced tokens, masks, output.

    Args:
        path: the model's file or folder.
        unused: number of logits without a token.
    """

    def __init__(self, path: Path, unused: int = 7) -> None:
        self.tokenizer: Tokenizer = ModelText.open(path).tokenizer
        self.width = self.tokenizer.vocab_size + unused
        self.vocabulary: LLTokenizer = read_vocabulary(path, self.width)
        closing = {b'"', b"}", b"]", b'"}', b"</", b"think", b">", b"\n"}
        self._closing = [token for token in range(self.width) if self.tokenizer.token_bytes(token) in closing]

    def matcher(self, grammar: str) -> GrammarMatcher:
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        assert not matcher.is_error(), matcher.get_error()
        return GrammarMatcher(matcher, self.width)

    def write(self, grammar: str, seed: int, limit: int = 150) -> str | None:
        """Return a random text; None if it is incomplete after `limit` tokens."""
        rng, matcher = random.Random(seed), self.matcher(grammar)
        detokenizer = Detokenizer(self.tokenizer)
        text, count = "", 0
        while not matcher.ended and count < limit:
            tokens = matcher.forced(rng.randint(1, 8)) if rng.random() < 0.8 else ()
            for token in tokens or [self._any_token(matcher, rng, hurry=count / limit)]:
                matcher.advance(token)
                assert not matcher.error, (matcher.error, text)
                count += 1
                if token in self.tokenizer.eos_ids:
                    assert matcher.ended
                else:
                    text += detokenizer.push([token])
        return text + detokenizer.flush() if matcher.ended else None

    def _any_token(self, matcher: GrammarMatcher, rng: random.Random, hurry: float) -> int:
        (mask,) = matcher.rejection_masks([self.width - 1], ()).values()  # no grammar allows padding
        assert not matcher.error, matcher.error
        allowed = _allowed(mask)
        assert allowed.max() < self.tokenizer.vocab_size
        preferred = [token for token in (*self.tokenizer.eos_ids, *self._closing) if token in allowed]
        return rng.choice(preferred) if preferred and rng.random() < hurry + 0.2 else int(rng.choice(allowed))


def _allowed(mask: Mask) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


def _saved(path: Path, backend: Backend, eos: str) -> Path:
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return path


def _sample() -> list[str]:
    """Return a text for the training of small vocabularies, with each character that the grammars require."""
    ascii_text = "".join(map(chr, range(0x20, 0x7F)))
    return [*multilingual.PIECES, *CHOICES, ascii_text, json.dumps(SCHEMA, ensure_ascii=False), "\n\t"] * 3


def unigram(path: Path) -> Path:
    """A small vocabulary like XLM-RoBERTa's: unigram model, NFKC, a space before the text, no byte tokens."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("{2,}", " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(  # type: ignore[call-arg]
        vocab_size=2000, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_sample(), trainer)
    return _saved(path, backend, "</s>")


def metaspace(path: Path) -> Path:
    """A small SentencePiece vocabulary with byte tokens, whose pre-tokenizer adds the space before a text."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=1500, limit_alphabet=60, special_tokens=["<unk>", "</s>", *byte_tokens], show_progress=False
    )
    backend.train_from_iterator(_sample(), trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:2]
    return _saved(path, Backend.from_str(json.dumps(state)), "</s>")


def prefixed_bytes(path: Path) -> Path:
    """A small byte-level vocabulary with a space before the text, like RoBERTa's, and with an added run of spaces."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    backend.train_from_iterator(_sample(), trainer)
    backend.add_tokens([AddedToken("  ", normalized=False), AddedToken("positive", normalized=False)])
    return _saved(path, backend, "</s>")


@pytest.fixture(scope="session")
def writer(
    request: pytest.FixtureRequest, llama_cpp_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Writer]:
    small = {"unigram": unigram, "metaspace": metaspace, "prefixed-bytes": prefixed_bytes}

    @cache
    def open_writer(name: str) -> Writer:
        if build := small.get(name):
            return Writer(build(tmp_path_factory.mktemp("vocabularies") / name))
        if name.endswith(("_gguf", "_tokenizer")):
            return Writer(request.getfixturevalue(name))
        return Writer(llama_cpp_models / f"ggml-vocab-{name}.gguf")

    return open_writer


BYTE_LEVEL = ["smollm2_gguf", "qwen2_5_tokenizer", "llama3_2_tokenizer", "mistral_nemo_tokenizer", "prefixed-bytes"]
SENTENCEPIECE = ["llama-spm", "phi-3", "gemma-4", "metaspace", "unigram"]
# Opening the first three takes seconds, and the others have all of their properties. "phi-3" is like "llama-spm".
SLOW = {"llama3_2_tokenizer", "qwen2_5_tokenizer", "gemma-4", "phi-3"}
DAILY = {*BYTE_LEVEL, *SENTENCEPIECE} - SLOW


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", daily(DAILY, [*BYTE_LEVEL, *SENTENCEPIECE]))
def test_decoded_output_matches_the_grammar_with_each_kind_of_vocabulary(
    writer: Callable[[str], Writer], name: str, form: str
) -> None:
    grammar, check = FORMS[form]
    texts = (writer(name).write(grammar, seed) for seed in range(5 * WALKS))
    complete = list(islice((text for text in texts if text is not None), WALKS))
    assert len(complete) == WALKS
    for text in complete:
        check(text)


@pytest.mark.parametrize("name", daily(DAILY, [*BYTE_LEVEL, *SENTENCEPIECE[:-1]]))
def test_text_forced_by_a_grammar_is_not_unicode_normalized(writer: Callable[[str], Writer], name: str) -> None:
    assert writer(name).write(for_choice([DECOMPOSED]), 0) == DECOMPOSED


def test_grammar_whose_text_the_vocabulary_cannot_spell_is_reported_as_a_bad_grammar(
    writer: Callable[[str], Writer],
) -> None:
    matcher = writer("unigram").matcher(for_choice([DECOMPOSED]))
    for token in matcher.forced(8):
        matcher.advance(token)
    assert matcher.rejection_masks([0], ()) == {}
    message = "the grammar allows no token of the model's vocabulary at this point; change the grammar"
    assert (matcher.error, matcher.bad_grammar) == (message, True)


def test_wordpiece_model_follows_a_grammar_that_its_tokens_can_spell_and_rejects_others(tmp_path: Path) -> None:
    tokens = ["[UNK]", "[SEP]", "un", "happy", "##happy", "{", "}", "##s"]
    backend = Backend(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    writer = Writer(_saved(tmp_path / "words", backend, "[SEP]"))
    choices = [" unhappy", " un happys", " { }"]
    assert {writer.write(for_choice(choices), seed) for seed in range(20)} == set(choices)
    unspellable = writer.matcher(for_schema({"type": "object"}))
    assert unspellable.rejection_masks([0], ()) == {}
    assert (unspellable.bad_grammar, "allows no token" in unspellable.error) == (True, True)


def test_end_token_whose_text_is_a_letter_is_not_used_for_the_letter(tmp_path: Path) -> None:
    """A configuration may name a token of the text as an end token, for example a default of the architecture."""
    backend = Backend(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["a", "b", "ab"])
    writer = Writer(_saved(tmp_path / "letters", backend, "b"))
    assert writer.matcher(for_choice(["aab"])).forced(3) == (0, writer.tokenizer.token_id("ab"))
    unspellable = writer.matcher(for_choice(["b"]))
    assert unspellable.rejection_masks([1], ()) == {}
    assert "allows no token" in unspellable.error


def test_very_long_tokens_do_not_disable_grammars(tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([*map(chr, range(0x21, 0x7F)), "a" * 300, "b" * 250])
    backend.add_special_tokens(["</s>"])
    writer = Writer(_saved(tmp_path / "long", backend, "</s>"))
    assert writer.write(for_choice(["a" * 300]), 0, 500) == "a" * 300
    assert writer.matcher(for_choice(["b" * 250])).forced(1) == (writer.tokenizer.token_id("b" * 250),)
