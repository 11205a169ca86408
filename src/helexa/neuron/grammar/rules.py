"""A grammar in the making: rules in llguidance's dialect of Lark, and the JSON Schemas that they refer to."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from helexa.neuron.grammar.digits import bounded

TokenId = Callable[[str], int | None]
"""The id of the token that is spelled so, None where the vocabulary has none."""

_COMPACT = {"whitespace_flexible": False}
# As chat templates write calls, which is what models have seen.
_SPACED = _COMPACT | {"item_separator": ", ", "key_separator": ": "}


class Rules:
    """Collects rules.

    Args:
        token_id: which markers are tokens: they are then asked for as such, however they could be spelled otherwise.
    """

    def __init__(self, token_id: TokenId = lambda _: None) -> None:
        self._token_id = token_id
        self._lines: dict[str, None] = {}
        self._parts: dict[str, dict[str, Any]] = {}

    def add(self, name: str, body: str) -> str:
        """Define a rule; what refers to it. Names in capitals are terminals, `[lazy]` and the like may follow."""
        self._lines[f"{name}: {body}"] = None  # which may be the same as before
        return name.partition("[")[0]

    def text_to(self, margin: str, marker: str, text: str) -> str:
        """What refers to text up to a marker, and that.

        Args:
            margin: the text's own end.
            text: what refers to the terminal that the text without its end is, in which `marker` does not occur.
        """
        if not self.is_token(marker):  # one lexeme, or the end would be taken for more of the text
            return self.add(f"{text.lower()}_to_end[lazy]", f"{text} {literal(margin + marker)}")
        if margin:
            text = self.add(f"{text}_WITH_MARGIN", f"{text} {literal(margin)}")
        return f"{text} {self.marker(marker)}"

    def schema(self, name: str, schema: Any, *, spaced: bool = False, lenient: bool = False) -> str:
        """What refers to JSON of this schema, whose numbers have bounded digits.

        Args:
            name: what a complaint about it calls it, with `_` for blanks.
            spaced: a blank stands after commas and colons; else none anywhere.
            lenient: what llguidance does not know of JSON Schema is left out of account.
        """
        options = (_SPACED if spaced else _COMPACT) | ({"lenient": True} if lenient else {})
        # Which draft it is of makes no difference, and llguidance would look its address up.
        stated = (
            {key: value for key, value in schema.items() if key != "$schema"} if isinstance(schema, Mapping) else {}
        )
        return self._part({"name": name, "json_schema": bounded(stated) | {"x-guidance": options}})

    def lark(self, name: str, text: str) -> str:
        """What refers to a whole grammar in Lark."""
        return self._part({"name": name, "lark_grammar": text})

    def include(self, name: str, grammar: str) -> str:
        """What refers to a grammar that is complete already."""
        first, *parts = json.loads(grammar)["grammars"]
        for part in parts:
            self._part(part)
        return self.lark(name, first["lark_grammar"])

    def is_token(self, marker: str) -> bool:
        """Whether a marker is one token."""
        return self._token_id(marker) is not None

    def marker(self, marker: str) -> str:
        """A marker as its token, or spelled."""
        token = self._token_id(marker)
        return literal(marker) if token is None else f"<[{token}]>"

    def serialised(self, start: str) -> str:
        """The grammar that begins with `start`."""
        text = "\n".join([f"start: {start}", *self._lines, ""])
        return json.dumps({"grammars": [{"lark_grammar": text}, *self._parts.values()]}, ensure_ascii=False)

    def _part(self, part: dict[str, Any]) -> str:
        self._parts[part["name"]] = part
        return f"@{part['name']}"


def literal(text: str) -> str:
    """Exactly this text, which must not be empty."""
    return json.dumps(text, ensure_ascii=False)


@lru_cache(64)
def without(strings: tuple[str, ...], beginnings: tuple[str, ...] = ()) -> str:
    """Any text that none of `strings` occurs in and that does not begin with one of `beginnings`, not even after white
    space, as the body of a terminal."""
    found, first = ("|".join(map(_pattern, some)) for some in (strings, beginnings))
    not_within = [f"~/(?s:.*)({found})(?s:.*)/"] if found else []
    not_first = [rf"~/\s*({first})(?s:.*)/"] if first else []
    return " & ".join(["/(?s:.*)/", *not_within, *not_first])


def _pattern(string: str) -> str:
    return re.sub(r"[][.^$*+?(){}|\\/]", r"\\\g<0>", string)
