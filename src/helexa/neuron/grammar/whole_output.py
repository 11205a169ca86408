"""Build grammars for a model's whole output, with or without reasoning before it.

A JSON Schema, a regular expression, a list of strings or a Lark grammar constrains the output.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.rules import Rules, TokenId, literal, without
from helexa.neuron.grammar.schema_adaptation import checked_schema
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from helexa.neuron.parsers.reasoning import ReasoningMarks

_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\\n])+/')

_MARGIN = r"/\n{0,2}/"  # line breaks between the reasoning and the constrained output, as in templates


def for_schema(schema: Any, *, lenient: bool = False) -> str:
    """Return a grammar of JSON text without white space that matches `schema`.

    If `lenient`, keywords that llguidance cannot enforce are ignored. Otherwise, a grammar with such keywords does not
    compile.

    Raises:
        ApiError: 400 `invalid_schema`: `schema` is not a JSON Schema, or is nested too deeply.
    """
    rules = Rules()
    return rules.serialized(rules.schema("schema", checked_schema(schema, "the schema"), lenient=lenient))


def for_regex(regex: str) -> str:
    """Return a grammar that allows only text that fully matches `regex`.

    The syntax is that of Rust's crate `regex`, which has no look-around.
    """
    # A grammar always matches the whole text, so the anchors `^` and `$` at the ends of the expression are removed.
    anchored = regex.removeprefix("^")
    if anchored.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$$", anchored):
        anchored = anchored[:-1]
    body = _SLASH.sub(lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), f"(?:{anchored})")
    return Rules().serialized(f"/{body}/")


def for_choice(choices: Sequence[str]) -> str:
    """Return a grammar that allows only the strings in `choices`.

    Raises:
        ApiError: 400 `invalid_grammar`: `choices` is empty or contains an empty string.
    """
    if not choices or not all(choices):
        raise ApiError(
            400,
            "invalid_grammar",
            "the list of choices must have at least one choice, and no choice may be an empty string",
        )
    rules = Rules()
    return rules.serialized(rules.add("CHOICE", " | ".join(map(literal, choices))))


def for_lark(lark: str) -> str:
    """Return a grammar from a text in llguidance's variant of Lark.

    Raises:
        ApiError: 400 `invalid_grammar`: `lark` names special tokens, or is written in another syntax.
    """
    if "::=" in lark:
        raise ApiError(
            400, "invalid_grammar", "the grammar has '::=', which is not Lark syntax; write rules as 'start: ...'"
        )
    # Special tokens control the conversation. For example, they end messages.
    if "<" in _QUOTED.sub("", lark):
        raise ApiError(
            400,
            "invalid_grammar",
            "the grammar names special tokens, which is not allowed; put each '<' in quotation marks",
        )
    rules = Rules()
    return rules.serialized(rules.lark("grammar", lark))


def after_reasoning(message: str, marks: ReasoningMarks, *, begun: bool, token_id: TokenId = lambda _: None) -> str:
    """Return a grammar of any reasoning, followed by output of the grammar `message`.

    If the prompt has `begun` the reasoning, the closing marker is required. Otherwise, the reasoning is optional.
    """
    rules = Rules(token_id)
    thought = rules.add("THOUGHT", without((marks.close,)))
    reasoning = f"{rules.text_to('', marks.close, thought)} {_MARGIN}"
    # The model may answer without reasoning.
    if not begun:
        reasoning = f"({rules.marker(marks.open)} {reasoning})?"
    return rules.serialized(f"{reasoning} {rules.include('message', message)}")


def in_final_channel(
    message: str, *, tool_call_format: str = "harmony", reasons: bool = True, token_id: TokenId = lambda _: None
) -> str:
    """Return a grammar of a final message whose content matches the grammar `message`.

    If the model `reasons`, a reasoning message may precede the final message. `tool_call_format` must be in `MESSAGES`.
    """
    rules = Rules(token_id)
    lead = MESSAGES[tool_call_format].reasoning(rules) if reasons else ""
    return rules.serialized(f"{lead} {MESSAGES[tool_call_format].final(rules, rules.include('message', message))}")


@dataclass(frozen=True)
class Messages:
    """Grammar of a format whose whole output consists of messages (`MessageFormat`).

    Each method returns a Lark expression. The expression of an optional message also contains the beginning of the next
    message, `<|start|>assistant`.
    """

    name: str  # name of the format
    end: str  # the marker at the end of a message
    marker: str  # the marker that replaces the first `{}` in the headers
    # Lark expressions of the headers, without `<|message|>`. The second `{}` in `answer` stands for `<|constrain|>`.
    thought: str  # header of reasoning
    interim: str  # header of a message to the user before a call
    answer: str  # header of the final answer

    def reasoning(self, rules: Rules) -> str:
        """Return the expression of an optional reasoning message."""
        return self._message(rules, self.thought)

    def before_call(self, rules: Rules) -> str:
        """Return the expression of an optional message to the user before a call."""
        return self._message(rules, self.interim)

    def final(self, rules: Rules, message: str = "") -> str:
        """Return the expression of an answer that matches `message` (any text if empty)."""
        head = self.answer.format(rules.marker(self.marker), rules.marker("<|constrain|>"))
        return f"{head} {rules.marker('<|message|>')} {message or self.text(rules)}"

    def text(self, rules: Rules, end: str = "") -> str:
        """Return the expression of a message's text, and of the marker `end` if given."""
        text = rules.add("TEXT", without(tuple(sorted(TOOL_CALL_FORMATS[self.name].markers))))
        return rules.text_to("", end, text) if end else text

    def again(self, rules: Rules) -> str:
        """Return the expression of a message's end and the next message's beginning."""
        return f'{rules.marker(self.end)} {rules.marker("<|start|>")} "assistant"'

    def _message(self, rules: Rules, head: str) -> str:
        start, end = rules.marker("<|start|>"), self.text(rules, self.end)
        return f'({head.format(rules.marker(self.marker))} {rules.marker("<|message|>")} {end} {start} "assistant")?'


MESSAGES = {
    # The header of an answer may state that the content is in the format `json`.
    "harmony": Messages(
        "harmony", "<|end|>", "<|channel|>", '{} "analysis"', '{} "commentary"', '{} "final" (" "? {} "json")?'
    ),
    "muse_glimmer": Messages("muse_glimmer", "<|eom|>", "<|message|>", '" to=self"', '" to=user"', '" to=user"?'),
}
