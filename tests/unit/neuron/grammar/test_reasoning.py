"""Grammars that allow reasoning before the message, with reasoning marks that are tokens or text."""

from typing import Any

import llguidance
import pytest

from helexa.neuron.grammar import after_reasoning, for_lark, for_schema, for_tools, in_final_channel
from helexa.neuron.parsers.formats.harmony_and_muse_glimmer import Harmony, MuseGlimmer
from helexa.neuron.parsers.reasoning import ReasoningMarks
from neuron.grammar.random_walks import Vocabulary, accepts, byte_level, matcher

MARKS = ReasoningMarks("<think>", "</think>")
MESSAGE = for_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
TOKENS = byte_level(["<think>", "</think>", "<tool_call>"])
ADDED = byte_level(["<think>", "</think>", "<tool_call>"], special=False)
TEXT = byte_level()
CHANNELS = byte_level(sorted(Harmony.frame))
MUSE = byte_level(sorted(MuseGlimmer.frame))
MUSE_THOUGHT = " to=self<|message|>Hm.<|eom|><|start|>assistant"
TOOLS = {"ping": {"type": "object", "properties": {"a": {"type": "integer"}}}}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("vocabulary", [TOKENS, ADDED, TEXT], ids=["tokens", "added tokens", "text"])
@pytest.mark.parametrize(
    ("text", "begun", "free"),
    [
        ('hm {"a":2}\n</think>\n\n{"a":1}', True, False),
        ('</think>{"a":1}', True, False),
        ('<think>\nüm\n</think>\n\n{"a":1}', None, True),  # marks that are text may occur in reasoning
        ('{"a":1}', False, True),
        ('hm</think>\n\n\n{"a":1}', False, False),
        ('hm</think>so {"a":1}', False, False),
        ('hm {"a":1}', False, False),
        ("hm", False, False),
    ],
)
def test_grammar_allows_a_constrained_message_after_reasoning(
    vocabulary: Vocabulary, text: str, begun: bool | None, free: bool
) -> None:
    for begins_in_reasoning, expected in ((True, begun), (False, free)):
        grammar = after_reasoning(MESSAGE, MARKS, begun=begins_in_reasoning, token_id=vocabulary.token_id)
        assert expected is None or accepts(grammar, text, vocabulary) == expected


def test_grammar_of_tools_requires_the_end_of_begun_reasoning_before_text_or_calls() -> None:
    for format_name in ("hermes", "llama3_json", "pythonic", "mistral", "qwen_xml", "deepseek"):
        tools = for_tools(format_name, TOOLS, "auto", True, token_id=TOKENS.token_id)
        grammar = after_reasoning(tools, MARKS, begun=True, token_id=TOKENS.token_id)
        assert accepts(grammar, "hm</think>\n\nHello,\n\nyou.", TOKENS), format_name
        assert not accepts(grammar, "hm", TOKENS), format_name


def test_lark_grammar_of_the_client_applies_after_the_reasoning() -> None:
    grammar = after_reasoning(for_lark('start: "a" %json {"type": "integer"}'), MARKS, begun=True)
    assert accepts(grammar, "hm</think>\na12")


def test_end_marker_of_the_reasoning_may_end_within_a_token() -> None:
    """In Llama 3's vocabulary, for example, `>` and line feeds form one token."""
    spellings = [b"<|end|>", *(bytes([byte]) for byte in range(256)), b">\n\n", b">{", b'>\n{"', b"><"]
    vocabulary = Vocabulary(spellings, [0], [0])
    grammar = after_reasoning(MESSAGE, MARKS, begun=True)
    remaining = {258: '"a":1}', 259: 'a":1}', 257: '{"a":1}'}
    for token, text in remaining.items():
        matched = matcher(vocabulary, grammar)
        tokens = [*(byte + 1 for byte in b"hm</think"), token, *(byte + 1 for byte in text.encode())]
        assert matched.consume_tokens(tokens) and matched.is_accepting()
    matched = matcher(vocabulary, grammar)
    assert matched.consume_tokens([byte + 1 for byte in b"hm</think"])
    assert not allowed(matched, 260), "the text after the mark is not the start of a message"


def allowed(matched: llguidance.LLMatcher, token: int) -> bool:
    mask = matched.compute_bitmask()
    return bool(mask[token // 8] >> token % 8 & 1)


@pytest.mark.parametrize("head", ["final", "final <|constrain|>json", "final<|constrain|>json"])
@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_constrained_message_in_harmony_format_is_in_the_final_channel(head: str, thought: str) -> None:
    grammar = in_final_channel(MESSAGE, token_id=CHANNELS.token_id)
    message = f'<|channel|>{head}<|message|>{{"a":1}}'
    assert accepts(grammar, thought + message, CHANNELS)
    assert not accepts(grammar, thought + message.replace("1", "x"), CHANNELS)
    assert not accepts(grammar, thought + "<|channel|>commentary<|message|>So.", CHANNELS)
    ended = in_final_channel(MESSAGE, reasons=False, token_id=CHANNELS.token_id)
    assert accepts(ended, thought + message, CHANNELS) == (not thought)


@pytest.mark.parametrize("head", [" to=user", ""])
@pytest.mark.parametrize("thought", ["", MUSE_THOUGHT])
def test_constrained_message_of_muse_glimmer_is_an_answer_to_the_user(head: str, thought: str) -> None:
    known: dict[str, Any] = {"tool_call_format": "muse_glimmer", "token_id": MUSE.token_id}
    message = f'{head}<|message|>{{"a":1}}'
    assert accepts(in_final_channel(MESSAGE, **known), thought + message, MUSE)
    assert not accepts(in_final_channel(MESSAGE, **known), thought + message.replace("1", "x"), MUSE)
    assert not accepts(in_final_channel(MESSAGE, **known), f"{thought} to=ping<|message|>{{}}", MUSE)
    assert accepts(in_final_channel(MESSAGE, reasons=False, **known), thought + message, MUSE) == (not thought)


@pytest.mark.parametrize(
    ("choice", "message", "allowed"),
    [
        ("auto", '<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{"a": 1}', True),
        ("required", '<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{"a": 1}', True),
        ("auto", "<|channel|>final<|message|>No.", True),
        ("required", "<|channel|>final<|message|>No.", False),
    ],
)
def test_grammar_in_harmony_format_rejects_reasoning_after_it_was_ended(
    choice: str, message: str, allowed: bool
) -> None:
    grammar = for_tools("harmony", TOOLS, choice, True, token_id=CHANNELS.token_id, reasons=False)
    assert accepts(grammar, message, CHANNELS) == allowed
    assert not accepts(grammar, THOUGHT + message, CHANNELS)
    grammar = for_tools("harmony", TOOLS, choice, True, token_id=CHANNELS.token_id)
    assert accepts(grammar, THOUGHT + message, CHANNELS) == allowed
