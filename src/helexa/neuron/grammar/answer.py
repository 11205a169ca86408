"""Builds grammars for a model's whole output.

The output can be constrained by a JSON Schema, a regular expression, a list of strings or a Lark grammar.
"""

import re
from collections.abc import Sequence
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.rules import Rules, literal
from helexa.neuron.grammar.schema import checked_schema

_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\\n])+/')


def for_schema(schema: Any, *, lenient: bool = False) -> str:
    """Return a grammar that allows only JSON text without white space that matches the JSON Schema `schema`.

    The schema `{"type": "object"}` allows any JSON object.

    Args:
        schema: the JSON Schema.
        lenient: whether to ignore keywords that llguidance cannot enforce. If False, a schema with such a keyword does
            not compile.

    Raises:
        ApiError: 400 `invalid_schema`: `schema` is not a JSON Schema, or is nested too deeply.
    """
    rules = Rules()
    return rules.serialised(rules.schema("schema", checked_schema(schema, "the schema"), lenient=lenient))


def for_regex(regex: str) -> str:
    """Return a grammar that allows only text that fully matches `regex`.

    The syntax is that of Rust's crate `regex`, which has no look-around.
    """
    anchored = regex.removeprefix("^")
    if anchored.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$$", anchored):
        anchored = anchored[:-1]
    body = _SLASH.sub(lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), f"(?:{anchored})")
    return Rules().serialised(f"/{body}/")


def for_choice(choices: Sequence[str]) -> str:
    """Return a grammar that allows only the strings in `choices`.

    Raises:
        ApiError: 400 `invalid_grammar`: `choices` is empty or contains an empty string.
    """
    if not choices or not all(choices):
        raise ApiError(400, "invalid_grammar", "there must be at least one choice, and none may be empty")
    rules = Rules()
    return rules.serialised(rules.add("CHOICE", " | ".join(map(literal, choices))))


def for_lark(lark: str) -> str:
    """Return a grammar from the text `lark`, which is written in llguidance's variant of Lark.

    Raises:
        ApiError: 400 `invalid_grammar`: `lark` names special tokens, or is written in another syntax.
    """
    if "::=" in lark:
        raise ApiError(400, "invalid_grammar", "the grammar must be in Lark syntax, with rules such as 'start: ...'")
    if "<" in _QUOTED.sub("", lark):
        raise ApiError(400, "invalid_grammar", "the grammar must not name special tokens")
    rules = Rules()
    return rules.serialised(rules.lark("grammar", lark))
