"""Conversion of servers' error responses to `ProviderError`."""

import pytest

from helexa.acp.providers.error_responses import MAX_MESSAGE_CHARACTERS, provider_error


def read(status, body, headers=None):
    return provider_error("home", status, body, headers or {}, ["sk-secret", ""])


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {"error": {"message": "invalid API key", "code": "invalid_api_key"}}, "auth"),
        (403, {"error": "forbidden"}, "auth"),
        (402, {"error": {"message": "Insufficient credits", "code": 402}}, "budget"),
        (429, {"error": {"message": "over", "code": "insufficient_quota"}}, "budget"),
        (429, {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, "rate_limit"),
        (429, {"error": {"message": "Too many tokens per minute for this context window"}}, "rate_limit"),
        (404, {"error": {"message": "The model `x` does not exist", "code": "model_not_found"}}, "model_not_found"),
        (404, {"error": {"message": 'model "x" not found, try pulling it first'}}, "model_not_found"),
        (404, {"error": {"message": "cold-load failed", "code": "service_unavailable"}}, "unavailable"),
        (404, "404 page not found", "invalid"),
        (404, {"detail": "Not Found"}, "invalid"),
        (400, {"error": {"message": "bad image"}}, "invalid"),
        (422, {"detail": [{"loc": ["body", "x"], "msg": "Extra inputs are not permitted"}]}, "invalid"),
        (301, "", "invalid"),
        (500, {"error": {"message": "boom"}}, "unavailable"),
        (502, "<html>Bad Gateway</html>", "unavailable"),
        (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "unavailable"),
        (200, {"type": "error", "error": {"type": "rate_limit_error", "message": "x"}}, "rate_limit"),
        (200, {"error": {"code": "server_error", "message": "x"}}, "unavailable"),
        (200, None, "unavailable"),
    ],
)
def test_status_and_body_of_an_error_response_determine_the_kind_of_error(status, body, kind):
    assert read(status, body).kind == kind


@pytest.mark.parametrize(
    ("status", "body", "limit"),
    [
        (400, {"error": {"message": "maximum context length is 8192 tokens", "code": "context_length_exceeded"}}, 8192),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded", "max": 4096}}, 4096),
        (400, {"object": "error", "message": "This model's maximum context length is 32,768 tokens. However"}, 32768),
        (400, {"error": {"code": 400, "message": "exceeds", "type": "exceed_context_size_error", "n_ctx": 2048}}, 2048),
        (400, {"type": "error", "error": {"message": "prompt is too long: 210000 tokens > 200000 maximum"}}, 200000),
        (400, {"error": {"message": "input length and max_tokens exceed context limit: 19 + 20 > 2000"}}, 2000),
        (400, {"error": "the model is loaded with context length of only 4096 tokens, which is not enough"}, 4096),
        (
            400,
            {"error": {"message": "Prompt contains 40000 tokens, too large for model with 32768 maximum context"}},
            32768,
        ),
        (400, [{"error": {"message": "exceeds the maximum number of tokens allowed (1048576)."}}], 1048576),
        (500, {"error": {"message": "context length exceeded: limit 4096"}}, 4096),
        (413, {"error": {"type": "request_too_large", "message": "Request exceeds the maximum size"}}, None),
        (400, {"error": {"message": "Please reduce the length of the messages or completion."}}, None),
    ],
)
def test_context_limit_is_read_from_the_error_message(status, body, limit):
    error = read(status, body)
    assert (error.kind, error.context_limit) == ("context_limit", limit)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("", None), ("soon", None), ("inf", None), ("nan", None)],
)
def test_retry_after_header_is_read_as_seconds(text, seconds):
    assert read(503, {}, {"retry-after": text}).retry_after == seconds


def test_retry_after_header_with_a_date_is_read_as_seconds():
    seconds = read(503, {}, {"retry-after": "Wed, 21 Oct 2099 07:28:00 GMT"}).retry_after
    assert seconds is not None
    assert seconds > 1e6


def test_error_message_names_the_endpoint_quotes_the_server_and_hides_secrets():
    message = read(400, {"error": {"message": "bad\nkey sk-secret " + "x" * 9999}}).message
    assert message.startswith("home rejected the request: bad key *** xxx")
    assert len(message) < MAX_MESSAGE_CHARACTERS + 50
    with_parameter = {"error": {"message": "not for this model", "param": "reasoning_effort"}}
    assert read(400, with_parameter).message.endswith("not for this model (reasoning_effort)")
    assert read(502, "<html>").message == "home is temporarily unavailable (HTTP 502)"


@pytest.mark.parametrize(
    "body", [None, 5, [], [5], {"error": None}, {"error": {"message": 5, "code": {}}}, "", "[" * 9]
)
def test_arbitrary_error_body_is_classified_without_an_exception(body):
    assert read(400, body).kind == "invalid"
