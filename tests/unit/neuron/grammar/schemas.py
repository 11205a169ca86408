"""Random JSON Schemas with the keywords that grammars support."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.sampled_from(["a", "b", "name", "x-y", "größe", 'q"t', "a b", "c\\d", "<t>"])
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1000, 1000),
    st.text(st.characters(exclude_categories=["C"]), max_size=6),
    st.lists(st.integers(0, 9), max_size=2),
    st.dictionaries(_NAMES, st.integers(0, 9), max_size=2),
)
_PATTERNS = ["^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(red|green)$", "x", "^a", "[0-9]+$", "^[A-Z][a-z]* ?[a-z]+$"]


@st.composite
def _ordered(draw: st.DrawFn, low: str, high: str, values: st.SearchStrategy[Any]) -> Schema:
    """Draw a lower bound, an upper bound, both in order, or none."""
    first, second = sorted([draw(values), draw(values)])
    bounds = {low: first, high: second}
    return {key: bounds[key] for key in draw(st.sets(st.sampled_from([low, high])))}


def _typed(kind: str, keywords: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return keywords.map(lambda keyword: {"type": kind} | keyword)


LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string"}, {"type": ["string", "integer"]}]),
    _typed("string", _ordered("minLength", "maxLength", st.integers(0, 12))),
    st.sampled_from(_PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
    _typed("integer", _ordered("minimum", "maximum", st.integers(-(10**6), 10**6))),
    _typed("number", _ordered("minimum", "maximum", st.integers(-100, 100).map(lambda number: number / 4))),
    st.integers(2, 9).map(lambda factor: {"type": "integer", "multipleOf": factor, "minimum": 0, "maximum": 500}),
    st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=4))
    schema: Schema = {"type": "object", "properties": properties, "title": "T", "description": "</parameter>"}
    schema["required"] = [name for name in properties if draw(st.booleans())]
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.one_of(st.just(False), inner))
    return schema


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    schema = {"type": "array", "items": draw(inner)} | draw(_ordered("minItems", "maxItems", st.integers(0, 3)))
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    return schema


def _nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    anyway = st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches})
    return st.one_of(_objects(inner), _arrays(inner), anyway)


_PLAIN = st.recursive(LEAVES, _nested, max_leaves=6)
_REFERENCE = st.sampled_from(["one", "two", "tree"]).map(lambda name: {"$ref": f"#/$defs/{name}"})


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Draw a schema with definitions, one of which refers to itself."""
    schema = draw(st.recursive(st.one_of(LEAVES, _REFERENCE), _nested, max_leaves=8))
    tree: Schema = {
        "type": "object",
        "properties": {"value": draw(LEAVES), "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return schema | {"$defs": {"one": draw(_PLAIN), "two": draw(_PLAIN), "tree": tree}}


@st.composite
def tool_schemas(draw: st.DrawFn) -> Schema:
    """Draw the schema of a tool's arguments."""
    schema = draw(_objects(st.one_of(LEAVES, _PLAIN, _REFERENCE)))
    definitions = draw(schemas())["$defs"]
    return schema | {"$defs": definitions}
