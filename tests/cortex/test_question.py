"""Reading bodies that anybody may send, and naming another model in them."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.cortex.requests.request import ClientRequest, parse_request

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
    """A JSON object with exactly these members, in this order, some of them twice perhaps."""
    blank, around = gaps
    coded = [
        f"{blank}{json.dumps(name, ensure_ascii=ascii)}{around}:{blank}{json.dumps(value, ensure_ascii=ascii)}{around}"
        for name, value in pairs
    ]
    return f"{around}{{{','.join(coded)}}}{blank}".encode("utf-8", "surrogatepass")


def asked(body: bytes) -> ClientRequest | None:
    """The question in a body; None for a refusal, in which everything is in order."""
    try:
        return parse_request(PATH, [], body)
    except ApiError as error:
        codes = {400: {"malformed_json", "missing_model_field", "invalid_request_body"}}
        assert error.code in codes[error.status]
        json.dumps(error.envelope()).encode()
        return None


@given(
    before=MEMBERS,
    model=NAMES,
    after=MEMBERS,
    other=NAMES,
    gaps=st.lists(BLANKS, min_size=2, max_size=2),
    ascii=st.booleans(),
)
@example([("model", "a")], "a", [], "b", ["", ""], True)
@example([], "a", [("model", "b")], "a", ["", ""], True)
@example([("x", {"model": "a"})], "a", [("y", '"model":"a"')], "b", ["", " "], True)
@example([("x", '"model":"a"')], "é", [], "b", ["", ""], False)
@example([("model", 1)], "\\", [("mod", '{"model":"\\')], '"', ["", ""], True)
def test_only_the_name_is_replaced(
    before: list[tuple[str, Any]],
    model: str,
    after: list[tuple[str, Any]],
    other: str,
    gaps: list[str],
    ascii: bool,
) -> None:
    body = members([*before, ("model", model), *after], gaps, ascii)
    question = asked(body)
    last = json.loads(body)["model"]
    named = [name for name, _ in (*before, *after) if name == "model"]
    if question is None:
        assert named or not last
        return
    assert not named
    assert question.model == last
    assert question.body_for(question.model) is body
    renamed = question.body_for(other)
    assert json.loads(renamed) == {**json.loads(body), "model": other}
    again = asked(renamed)
    assert again is not None
    assert (again.model, again.stream, again.spending.output) == (other, question.stream, question.spending.output)


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
def test_no_body_is_a_fault(body: bytes) -> None:
    question = asked(body)
    if question is not None:
        named = question.body_for("Org/M")
        assert parse_request(PATH, [], named).model == "Org/M"


@given(TREES)
def test_any_json_is_read_or_refused(value: Any) -> None:
    asked(json.dumps(value).encode())


@given(st.dictionaries(st.sampled_from(["max_tokens", "max_completion_tokens", "max_output_tokens", "n"]), TREES))
def test_limits_are_whole_numbers_above_zero(limits: dict[str, Any]) -> None:
    question = asked(json.dumps({"model": "a", **limits}).encode())
    honored = [limits.get(name) for name in ("max_tokens", "max_completion_tokens", "n")]
    fine = all(value is None or (type(value) is int and value > 0) for value in honored)
    assert (question is not None) == (fine and (limits.get("n") or 0) <= 128)
    if question is not None:
        assert question.spending.output is None or question.spending.output > 0
        assert question.tokens(None) > 0


@pytest.mark.parametrize("body", [b'{"model":"a"}', b'{"stream":true,"max_tokens":5,"model":"a"}'])
def test_the_clients_own_bytes_stay(body: bytes) -> None:
    question = parse_request(PATH, [], body)
    assert question.body_for("Org/M") == body.replace(b'"a"', b'"Org/M"')


@pytest.mark.parametrize("value", [b"1e999", b"[" * 500 + b"]" * 500])
def test_values_that_few_parsers_read_are_passed_on(value: bytes) -> None:
    question = parse_request(PATH, [], b'{"m\\u006fdel":"a","x":%s}' % value)
    assert question.body_for("a") is question.body
    assert question.body_for("Org/M") == b'{"x":%s,"model":"Org/M"}' % value


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{"model":null,"model":"a"}',
        b'{"model":"a","x":[{"model":"c"}],"m\\u006fdel":"b"}',
    ],
)
def test_model_that_is_named_twice_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="'model' must be given once") as caught:
        parse_request(PATH, [], body)
    assert (caught.value.status, caught.value.param) == (400, "model")


@pytest.mark.parametrize(
    "body", [b'{"model":"a","Model":"b"}', b'{"MODEL":"b","model":"a"}', b'{"model":"a","mode\\u004c":null}']
)
def test_other_spelling_of_model_is_refused_for_third_party_backends(body: bytes) -> None:
    question = parse_request(PATH, [], body)
    assert question.body_for("a") is body  # nodes of our own know no other spelling
    with pytest.raises(ApiError, match="'model' must be written in lower case") as caught:
        question.body_for("a", "openai")
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_model_may_be_a_name_within_other_fields() -> None:
    parse_request(PATH, [], b'{"model":"a","x":{"model":"b","Model":"c","y":"\\"model\\":"}}')
