"""Grammars for a whole answer: JSON, a regular expression, one of some strings, or what the client wrote in Lark."""

import re
from collections.abc import Sequence
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.rules import Rules, literal
from helexa.neuron.grammar.schema import checked_schema

_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\\n])+/')


def for_schema(schema: Any, *, lenient: bool = False) -> str:
    """JSON of a schema, without any white space. `{"type": "object"}` is JSON mode.

    Args:
        lenient: what cannot be enforced of the schema is left out of account; else the grammar will not compile.

    Raises:
        ApiError: 400 `invalid_schema`: it is no schema.
    """
    rules = Rules()
    return rules.serialised(rules.schema("schema", checked_schema(schema, "the schema"), lenient=lenient))


def for_regex(regex: str) -> str:
    """Text that matches a regular expression as a whole, in the syntax of Rust's `regex`, which has no look-around."""
    anchored = regex.removeprefix("^")
    if anchored.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$$", anchored):
        anchored = anchored[:-1]
    body = _SLASH.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), f"(?:{anchored})")
    return Rules().serialised(f"/{body}/")


def for_choice(choices: Sequence[str]) -> str:
    """One of some strings.

    Raises:
        ApiError: 400 `invalid_grammar`: there are none, or an empty one.
    """
    if not choices or not all(choices):
        raise ApiError(400, "invalid_grammar", "there must be at least one choice, and none may be empty")
    rules = Rules()
    return rules.serialised(rules.add("CHOICE", " | ".join(map(literal, choices))))


def for_lark(lark: str) -> str:
    """Text of a context-free grammar in llguidance's dialect of Lark.

    Raises:
        ApiError: 400 `invalid_grammar`: it names special tokens, or is of another dialect.
    """
    if "::=" in lark:
        raise ApiError(
            400, "invalid_grammar", "the grammar must be in Lark's notation, with rules such as 'start: ...'"
        )
    if "<" in _QUOTED.sub("", lark):
        raise ApiError(400, "invalid_grammar", "the grammar must not name special tokens")
    rules = Rules()
    return rules.serialised(rules.lark("grammar", lark))
