import pickle

import pytest

from helexa.core import errors
from helexa.core.errors import ApiError


def test_error_envelope_contains_all_fields_of_an_api_error_and_its_extras() -> None:
    error = ApiError(418, "short", "and stout", param="spout", tip=1)
    assert error.envelope() == {
        "error": {"message": "and stout", "type": "invalid_request_error", "code": "short", "param": "spout", "tip": 1}
    }
    assert str(error) == "and stout" and error.status == 418


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after"),
    [
        (errors.malformed_json("x"), 400, "invalid_request_error", "malformed_json", None),
        (errors.invalid_body("x"), 400, "invalid_request_error", "invalid_request_body", None),
        (errors.unsupported_media_type("x"), 415, "invalid_request_error", "unsupported_media_type", None),
        (errors.unsupported_parameter("x"), 400, "invalid_request_error", "unsupported_parameter", None),
        (errors.missing_model(), 400, "invalid_request_error", "missing_model_field", None),
        (errors.model_not_found("x"), 404, "invalid_request_error", "model_not_found", None),
        (errors.context_length_exceeded(9, 8), 400, "invalid_request_error", "context_length_exceeded", None),
        (errors.vision_unsupported("x"), 400, "invalid_request_error", "vision_unsupported", None),
        (errors.service_unavailable("x", 5), 503, "api_error", "service_unavailable", 5),
        (errors.overloaded("x", 7), 503, "rate_limit_error", "rate_limit_exceeded", 7),
        (errors.overloaded("x", 7, 429), 429, "rate_limit_error", "rate_limit_exceeded", 7),
        (errors.shutting_down(), 503, "api_error", "shutting_down", 15),
        (errors.internal_error(), 500, "api_error", None, None),
    ],
)
def test_api_errors_have_status_type_code_and_retry_after(
    error: ApiError, status: int, kind: str, code: str | None, retry_after: int | None
) -> None:
    assert (error.status, error.type, error.code) == (status, kind, code)
    assert error.headers() == ({} if retry_after is None else {"Retry-After": str(retry_after)})
    assert "\n" not in str(error)


def test_error_for_a_too_long_prompt_has_the_wording_that_agents_recognize() -> None:
    error = errors.context_length_exceeded(prompt_tokens=9000, limit=8192)
    assert "maximum context length is 8192 tokens" in str(error)
    assert error.extras == {"prompt_len": 9000, "max": 8192}


def test_model_not_found_error_appends_the_hint() -> None:
    error = errors.model_not_found("a/b", "did you mean 'a/c'?")
    assert str(error) == "model 'a/b' not found; did you mean 'a/c'?"
    assert error.envelope()["error"]["model_id"] == "a/b"


def test_source_error_carries_its_kind_and_details() -> None:
    error = errors.SourceError("no such quant", kind="quant_not_found", quant="q9")
    assert (error.kind, error.details) == ("quant_not_found", {"quant": "q9"})
    assert errors.SourceError("x").kind == "repo_fetch_failed"


def test_error_of_a_model_file_is_one_printable_line() -> None:
    error = errors.ModelFileError("type 'a\n\x1b[31mb' is\tunknown", advice="")
    assert str(error) == "type 'a [31mb' is unknown"
    long = str(errors.ModelFileError("x" * 5000))
    assert len(long) == 1000
    assert long.endswith("x...; download the model again, or use another file of it")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.ModelFileError("a is 1"), "a is 1; download the model again, or use another file of it"),
        (errors.UnsupportedModelError("a is 1"), "a is 1; use another model, or update helexa"),
        (errors.ModelFileError("a is 1", advice="set a to 2"), "a is 1; set a to 2"),
    ],
)
def test_error_of_a_model_file_says_what_the_user_can_do(error: errors.ModelFileError, message: str) -> None:
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == message
    assert error.problem == "a is 1"
