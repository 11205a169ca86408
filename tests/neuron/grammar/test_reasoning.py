"""What grammars let through of reasoning, and where the answer begins, whether marks are tokens or text."""

import llguidance
import pytest

from helexa.neuron.grammar import after_reasoning, for_lark, for_schema, for_tools, in_final_channel
from helexa.neuron.parsers.formats.harmony import Harmony
from helexa.neuron.parsers.reasoning import ReasoningMarks
from neuron.grammar.walking import Vocabulary, accepts, byte_level, matcher

MARKS = ReasoningMarks("<think>", "</think>")
ANSWER = for_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
TOKENS = byte_level(["<think>", "</think>", "<tool_call>"])
ADDED = byte_level(["<think>", "</think>", "<tool_call>"], special=False)
TEXT = byte_level()
CHANNELS = byte_level(sorted(Harmony.markers))
TOOLS = {"ping": {"type": "object", "properties": {"a": {"type": "integer"}}}}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("vocabulary", [TOKENS, ADDED, TEXT], ids=["tokens", "added tokens", "text"])
@pytest.mark.parametrize(
    ("text", "begun", "free"),
    [
        ('hm {"a":2}\n</think>\n\n{"a":1}', True, False),
        ('</think>{"a":1}', True, False),
        ('<think>\nüm\n</think>\n\n{"a":1}', None, True),  # where marks are text, so may be the first
        ('{"a":1}', False, True),
        ('hm</think>\n\n\n{"a":1}', False, False),
        ('hm</think>so {"a":1}', False, False),
        ('hm {"a":1}', False, False),
        ("hm", False, False),
    ],
)
def test_an_answer_comes_after_reasoning(vocabulary: Vocabulary, text: str, begun: bool | None, free: bool) -> None:
    for said, expected in ((True, begun), (False, free)):
        grammar = after_reasoning(ANSWER, MARKS, begun=said, token_id=vocabulary.token_id)
        assert expected is None or accepts(grammar, text, vocabulary) == expected


def test_reasoning_comes_before_text_and_calls_too() -> None:
    for family in ("hermes", "llama3_json", "pythonic", "mistral", "qwen_xml", "deepseek"):
        tools = for_tools(family, TOOLS, "auto", True, token_id=TOKENS.token_id)
        grammar = after_reasoning(tools, MARKS, begun=True, token_id=TOKENS.token_id)
        assert accepts(grammar, "hm</think>\n\nHello,\n\nyou.", TOKENS), family
        assert not accepts(grammar, "hm", TOKENS), family


def test_a_lark_grammar_may_come_after_reasoning() -> None:
    grammar = after_reasoning(for_lark('start: "a" %json {"type": "integer"}'), MARKS, begun=True)
    assert accepts(grammar, "hm</think>\na12")


def test_a_mark_may_end_within_a_token() -> None:
    """As with the vocabulary of Llama 3, where `>` and line feeds are one token."""
    spellings = [b"<|end|>", *(bytes([byte]) for byte in range(256)), b">\n\n", b">{", b'>\n{"', b"><"]
    vocabulary = Vocabulary(spellings, [0], [0])
    grammar = after_reasoning(ANSWER, MARKS, begun=True)
    rest = {258: '"a":1}', 259: 'a":1}', 257: '{"a":1}'}
    for token, text in rest.items():
        made = matcher(vocabulary, grammar)
        tokens = [*(byte + 1 for byte in b"hm</think"), token, *(byte + 1 for byte in text.encode())]
        assert made.consume_tokens(tokens) and made.is_accepting()
    made = matcher(vocabulary, grammar)
    assert made.consume_tokens([byte + 1 for byte in b"hm</think"])
    assert not allowed(made, 260), "what the token has beyond the mark begins no answer"


def allowed(made: llguidance.LLMatcher, token: int) -> bool:
    mask = made.compute_bitmask()
    return bool(mask[token // 8] >> token % 8 & 1)


@pytest.mark.parametrize("head", ["final", "final <|constrain|>json", "final<|constrain|>json"])
@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_harmony_has_its_answer_in_the_final_channel(head: str, thought: str) -> None:
    grammar = in_final_channel(ANSWER, token_id=CHANNELS.token_id)
    answer = f'<|channel|>{head}<|message|>{{"a":1}}'
    assert accepts(grammar, thought + answer, CHANNELS)
    assert not accepts(grammar, thought + answer.replace("1", "x"), CHANNELS)
    assert not accepts(grammar, thought + "<|channel|>commentary<|message|>So.", CHANNELS)
    ended = in_final_channel(ANSWER, reasons=False, token_id=CHANNELS.token_id)
    assert accepts(ended, thought + answer, CHANNELS) == (not thought)


@pytest.mark.parametrize(
    ("choice", "answer", "allowed"),
    [
        ("auto", '<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{"a": 1}', True),
        ("required", '<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{"a": 1}', True),
        ("auto", "<|channel|>final<|message|>No.", True),
        ("required", "<|channel|>final<|message|>No.", False),
    ],
)
def test_reasoning_that_was_ended_does_not_begin_again(choice: str, answer: str, allowed: bool) -> None:
    grammar = for_tools("harmony", TOOLS, choice, True, token_id=CHANNELS.token_id, reasons=False)
    assert accepts(grammar, answer, CHANNELS) == allowed
    assert not accepts(grammar, THOUGHT + answer, CHANNELS)
    grammar = for_tools("harmony", TOOLS, choice, True, token_id=CHANNELS.token_id)
    assert accepts(grammar, THOUGHT + answer, CHANNELS) == allowed
