"""Build a grammar: rules in llguidance's variant of Lark, and JSON Schemas."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from helexa.neuron.grammar.schema_adaptation import bounded, supportable

TokenId = Callable[[str], int | None]  # returns the token id of a string, or None if it is not a single token

_COMPACT = {"whitespace_flexible": False}
# The spacing of calls in chat templates, which models have seen in training.
_SPACED = _COMPACT | {"item_separator": ", ", "key_separator": ": "}


class Rules:
    """Collects the rules of a grammar. Its methods return Lark expressions.

    If the vocabulary has a marker as a single token (`token_id`), the grammar requires this token for the marker.
    """

    def __init__(self, token_id: TokenId = lambda _: None) -> None:
        self._token_id = token_id
        self._lines: dict[str, None] = {}
        self._nested: dict[str, dict[str, Any]] = {}

    def add(self, name: str, body: str) -> str:
        """Add the rule `name` with the Lark expression `body`, and return the name.

        A name in capitals defines a terminal. `name` may end in options such as `[lazy]`, which the returned name
        omits.
        """
        self._lines[f"{name}: {body}"] = None  # a dict, because the same rule may be added twice
        return name.partition("[")[0]

    def text_to(self, margin: str, marker: str, text: str) -> str:
        """Return a Lark expression: the terminal named `text`, then `margin` and `marker`.

        The terminal must exclude text that contains `marker` (see `without`).
        """
        # The terminal must not match text that contains `marker`.
        if not self.is_token(marker):  # one terminal, because a separate `text` would also match the marker
            end = margin + marker
            return self.add(f"{text.lower()}_to_{end.encode().hex()}[lazy]", f"{text} {literal(end)}")
        if margin:
            text = self.add(f"{text}_WITH_MARGIN", f"{text} {literal(margin)}")
        return f"{text} {self.marker(marker)}"

    def schema(self, name: str, schema: Any, *, spaced: bool = False, lenient: bool = False) -> str:
        """Return a Lark expression for JSON text that matches `schema`.

        Numbers have a limited number of digits (see `bounded`).

        Args:
            name: name of the schema in error messages, with `_` for spaces. It replaces a schema of the same name.
            spaced: whether a space is required after commas and colons. If False, no white space is allowed.
            lenient: whether to ignore keywords that llguidance does not support.
        """
        options = (_SPACED if spaced else _COMPACT) | ({"lenient": True} if lenient else {})
        # Leave out `$schema`, because llguidance would look up its address. The JSON Schema draft makes no difference.
        if isinstance(schema, Mapping):
            without_draft = {key: value for key, value in schema.items() if key != "$schema"}
        else:
            without_draft = {"allOf": [False]} if schema is False else {}  # an object, because it gets options below
        supported = bounded(supportable(without_draft))
        return self._add_nested({"name": name, "json_schema": supported | {"x-guidance": options}})

    def lark(self, name: str, text: str) -> str:
        """Add the complete Lark grammar `text`. Return an expression that refers to it."""
        return self._add_nested({"name": name, "lark_grammar": text})

    def include(self, name: str, grammar: str) -> str:
        """Add a serialized grammar. Return a Lark expression that refers to the grammar."""
        first, *nested = json.loads(grammar)["grammars"]
        for rule in nested:
            self._add_nested(rule)
        return self.lark(name, first["lark_grammar"])

    def is_token(self, marker: str) -> bool:
        """Return whether the model's vocabulary has `marker` as a single token."""
        return self._token_id(marker) is not None

    def marker(self, marker: str) -> str:
        """Return a Lark expression for `marker`: its token id, or a literal string."""
        token = self._token_id(marker)
        return literal(marker) if token is None else f"<[{token}]>"

    def serialized(self, start: str) -> str:
        """Return the whole grammar, whose start rule is `start`, as JSON text."""
        text = "\n".join([f"start: {start}", *self._lines, ""])
        return json.dumps({"grammars": [{"lark_grammar": text}, *self._nested.values()]}, ensure_ascii=False)

    def _add_nested(self, rule: dict[str, Any]) -> str:
        self._nested[rule["name"]] = rule
        return f"@{rule['name']}"


def literal(text: str) -> str:
    """Return the Lark literal that matches exactly `text`, which must not be empty."""
    return json.dumps(text, ensure_ascii=False)


@lru_cache(64)
def without(strings: tuple[str, ...], beginnings: tuple[str, ...] = ()) -> str:
    """Return a Lark expression for text without any of `strings`, for a terminal.

    The text also does not begin with one of `beginnings`, not even after white space.
    """
    anywhere, first = ("|".join(map(escaped, group)) for group in (strings, beginnings))
    not_within = [f"~/(?s:.*)({anywhere})(?s:.*)/"] if anywhere else []
    not_first = [rf"~/\s*({first})(?s:.*)/"] if first else []
    return " & ".join(["/(?s:.*)/", *not_within, *not_first])


def escaped(string: str) -> str:
    """Return a regular expression, for a grammar, that matches exactly `string`."""
    return re.sub(r"[][.^$*+?(){}|\\/]", r"\\\g<0>", string).replace("\n", r"\n")
