"""Parsing of untrusted request bodies, and replacement of the model name in them."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.cortex.forwarding.request import ClientRequest, parse_request

PATH = "/v1/chat/completions"
NAMES = st.text(min_size=1, max_size=20) | st.sampled_from(
    ["model", '"', "\\", "Org/M", "é", "\x7f\u2028", "😀", '"model"']
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TREES = st.recursive(
    SCALARS | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
NUMBERS = {"n", "max_tokens", "max_completion_tokens"}  # refused with a value of another type; see test_spending.py
MEMBERS = st.lists(st.tuples(NAMES.filter(lambda name: name not in NUMBERS), TREES), max_size=4)
BLANKS = st.sampled_from(["", " ", "\n\t", "\r\n "])


def members(pairs: list[tuple[str, Any]], gaps: list[str], ascii: bool) -> bytes:
    """Return a JSON object with these members in this order. Names may occur twice."""
    blank, around = gaps
    coded = [
        f"{blank}{json.dumps(name, ensure_ascii=ascii)}{around}:{blank}{json.dumps(value, ensure_ascii=ascii)}{around}"
        for name, value in pairs
    ]
    return f"{around}{{{','.join(coded)}}}{blank}".encode("utf-8", "surrogatepass")


def parse_or_none(body: bytes) -> ClientRequest | None:
    """Parse a body. Return None if it is rejected with a valid error response."""
    try:
        return parse_request(PATH, [], body)
    except ApiError as error:
        codes = {400: {"malformed_json", "missing_model_field", "invalid_request_body"}}
        assert error.code in codes[error.status]
        json.dumps(error.envelope()).encode()
        return None


@given(
    prefix_members=MEMBERS,
    model=NAMES,
    suffix_members=MEMBERS,
    replacement=NAMES,
    gaps=st.lists(BLANKS, min_size=2, max_size=2),
    ascii=st.booleans(),
)
@example([("model", "a")], "a", [], "b", ["", ""], True)
@example([], "a", [("model", "b")], "a", ["", ""], True)
@example([("x", {"model": "a"})], "a", [("y", '"model":"a"')], "b", ["", " "], True)
@example([("x", '"model":"a"')], "é", [], "b", ["", ""], False)
@example([("model", 1)], "\\", [("mod", '{"model":"\\')], '"', ["", ""], True)
def test_replacing_the_model_changes_nothing_else_in_any_request_body(
    prefix_members: list[tuple[str, Any]],
    model: str,
    suffix_members: list[tuple[str, Any]],
    replacement: str,
    gaps: list[str],
    ascii: bool,
) -> None:
    body = members([*prefix_members, ("model", model), *suffix_members], gaps, ascii)
    request = parse_or_none(body)
    last = json.loads(body)["model"]
    duplicates = [name for name, _ in (*prefix_members, *suffix_members) if name == "model"]
    if request is None:
        assert duplicates or not last
        return
    assert not duplicates
    assert request.model == last
    assert request.body_for(request.model) is body
    renamed = request.body_for(replacement)
    assert json.loads(renamed) == {**json.loads(body), "model": replacement}
    again = parse_or_none(renamed)
    assert again is not None
    assert (again.model, again.stream, again.spending.output) == (replacement, request.stream, request.spending.output)


@given(st.binary(max_size=200))
@example(b"\xff")
@example(b'{"model":"\xff"}')
@example(b'{"model":"\xed\xa0\x80"}')
@example(b'{"model":"\\ud800"}')
@example(b'{"model":"a","x":"\\ud800"}')
@example(b'{"model":"a","x":1e999}')
@example(b'{"model":"a","x":NaN}')
@example(b'{"model":"a",}')
@example(b'{"model":"a"}{}')
@example(b'\xef\xbb\xbf{"model":"a"}')
@example(b"[" * 100_000)
@example(b'{"model":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
@example(b'{"model":"a","x":' + b'{"x":' * 2000 + b"1" + b"}" * 2000 + b"}")
@example(b'{"model":"a","max_tokens":' + b"9" * 5000 + b"}")
@example(b'{"model":"a\\u0000"}')
@example(b"\x00")
@example(b"")
def test_any_bytes_as_request_body_are_parsed_or_rejected(body: bytes) -> None:
    request = parse_or_none(body)
    if request is not None:
        renamed = request.body_for("Org/M")
        assert parse_request(PATH, [], renamed).model == "Org/M"


def test_half_of_a_surrogate_pair_reaches_the_node_as_a_replacement_character() -> None:
    request = parse_request(PATH, [], rb'{"model":"a","messages":[{"role":"user","content":"x\ud83d"}]}')
    assert json.loads(request.body_for("b"))["messages"][0]["content"] == "x\ufffd"


@given(TREES)
def test_any_json_as_request_body_is_parsed_or_rejected(value: Any) -> None:
    parse_or_none(json.dumps(value).encode())


@given(st.dictionaries(st.sampled_from(["max_tokens", "max_completion_tokens", "max_output_tokens", "n"]), TREES))
def test_token_limits_of_a_request_must_be_positive_integers(limits: dict[str, Any]) -> None:
    request = parse_or_none(json.dumps({"model": "a", **limits}).encode())
    honored = [limits.get(name) for name in ("max_tokens", "max_completion_tokens", "n")]
    fine = all(value is None or (type(value) is int and value > 0) for value in honored)
    assert (request is not None) == (fine and (limits.get("n") or 0) <= 128)
    if request is not None:
        assert request.spending.output is None or request.spending.output > 0
        assert request.tokens(None) > 0


@pytest.mark.parametrize("body", [b'{"model":"a"}', b'{"stream":true,"max_tokens":5,"model":"a"}'])
def test_replacing_the_model_keeps_all_other_bytes_of_the_body(body: bytes) -> None:
    request = parse_request(PATH, [], body)
    assert request.body_for("Org/M") == body.replace(b'"a"', b'"Org/M"')


@pytest.mark.parametrize("value", [b"1e999", b"[" * 500 + b"]" * 500])
def test_json_values_that_few_parsers_accept_are_forwarded(value: bytes) -> None:
    request = parse_request(PATH, [], b'{"m\\u006fdel":"a","x":%s}' % value)
    assert request.body_for("a") is request.body
    assert request.body_for("Org/M") == b'{"x":%s,"model":"Org/M"}' % value


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{"model":null,"model":"a"}',
        b'{"model":"a","x":[{"model":"c"}],"m\\u006fdel":"b"}',
    ],
)
def test_duplicate_model_field_is_rejected(body: bytes) -> None:
    with pytest.raises(ApiError, match="'model' is given more than once") as caught:
        parse_request(PATH, [], body)
    assert (caught.value.status, caught.value.param) == (400, "model")


@pytest.mark.parametrize(
    "body", [b'{"model":"a","Model":"b"}', b'{"MODEL":"b","model":"a"}', b'{"model":"a","mode\\u004c":null}']
)
def test_field_model_in_other_letter_case_is_rejected_for_third_party_backends(body: bytes) -> None:
    request = parse_request(PATH, [], body)
    assert request.body_for("a") is body  # helexa's nodes accept only the lower-case field
    with pytest.raises(ApiError, match="'model' must be written in lower case") as caught:
        request.body_for("a", "openai")
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_nested_fields_named_model_are_accepted() -> None:
    parse_request(PATH, [], b'{"model":"a","x":{"model":"b","Model":"c","y":"\\"model\\":"}}')
