"""Finding, checking and replacing the images of a request body."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.images.image_server import PNG_URL
from helexa.core.errors import ApiError
from helexa.core.image_file import MIN_TOKENS
from helexa.cortex.forwarding.token_bounds import PromptImages
from helexa.cortex.request_images import ImageLimits, RemoteImage, check_images, count_images, replace_urls

LIMITS = ImageLimits(max_images=3, max_bytes=1000, fetches=True)
NO_FETCHES = ImageLimits(max_images=3, max_bytes=1000, fetches=False)
REMOTE = "https://images.example.com/a.png?signature=secret"


def chat(*parts: Any, role: str = "user") -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": role, "content": list(parts)}]}).encode()


def image(url: Any = PNG_URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def responses(*items: Any) -> bytes:
    return json.dumps({"model": "m", "input": list(items)}).encode()


TEXT = {"type": "text", "text": '"type": "image_url"'}
CALL_OUTPUT = {"type": "function_call_output", "call_id": "1"}
INPUT_IMAGE = {"type": "input_image", "image_url": PNG_URL, "detail": "original"}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (chat(TEXT), 0),
        (chat(image()), 1),
        (chat(TEXT, image(detail="low"), image(detail=None), role="tool"), 2),
        (chat({"image_url": PNG_URL}), 1),
        (chat({"type": "input_image", "image_url": PNG_URL}), 1),
        (chat(image()).replace(b"image_url", rb"image\u005furl"), 1),
        (responses({"role": "user", "content": [INPUT_IMAGE]}), 1),
        (responses({"role": "user", "content": [INPUT_IMAGE]}, CALL_OUTPUT | {"output": [INPUT_IMAGE]}), 2),
        (responses({"type": "computer_call_output", "output": {"image_url": PNG_URL}}), 1),
        (responses("odd", {"content": 5, "output": None}), 0),
        (b'{"input": "text", "messages": null, "image_url": "x"}', 0),
        (b"[]", 0),
    ],
)
def test_images_of_a_request_are_counted_in_each_api(body: bytes, count: int) -> None:
    assert count_images(body) == count
    assert check_images(body, NO_FETCHES).images == PromptImages(count, count * len(PNG_URL), count * MIN_TOKENS)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (chat(TEXT, image("ftp://x")), "invalid_image_url", "messages.0.content.1"),
        (chat(image("file:///etc/passwd")), "invalid_image_url", "messages.0.content.0"),
        (chat(image("")), "invalid_image_url", "messages.0.content.0"),
        (chat(image("data:image/png;base64,!")), "invalid_base64_image", "messages.0.content.0"),
        (chat(image(REMOTE)), "invalid_image_url", "messages.0.content.0"),
        (chat(image(5)), "invalid_request_body", "messages.0.content.0"),
        (chat({"type": "image_url"}), "invalid_request_body", "messages.0.content.0"),
        (chat({"type": "image", "image_url": None}), "invalid_request_body", "messages.0.content.0"),
        (chat(image(detail="huge")), "invalid_request_body", "messages.0.content.0.detail"),
        (chat(image(detail={})), "invalid_request_body", "messages.0.content.0.detail"),
        (chat(*[image()] * 4), "too_many_images", "messages.0.content.3"),
        (
            responses({"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}),
            "unsupported_parameter",
            "input.0.content.0.file_id",
        ),
    ],
)
def test_request_with_an_invalid_image_is_rejected(body: bytes, code: str, param: str) -> None:
    with pytest.raises(ApiError) as rejected:
        check_images(body, NO_FETCHES)
    assert (rejected.value.status, rejected.value.code, rejected.value.param) == (400, code, param)


def test_image_error_names_the_position_of_the_image_and_not_its_url() -> None:
    with pytest.raises(ApiError, match=r"^image 2 of the request: the image has an http\(s\) URL") as rejected:
        check_images(chat(image(), image(REMOTE)), NO_FETCHES)
    assert "secret" not in str(rejected.value)


def test_image_urls_are_replaced_everywhere_in_the_conversation() -> None:
    body = responses(
        {"role": "user", "content": [{"type": "input_image", "image_url": REMOTE}, INPUT_IMAGE]},
        CALL_OUTPUT | {"output": [{"type": "input_image", "image_url": REMOTE}]},
    )
    assert check_images(body, LIMITS).remote == (RemoteImage(1, REMOTE), RemoteImage(3, REMOTE))
    new_body = replace_urls(body, {REMOTE: "data:new"})
    assert json.loads(new_body) == json.loads(body.replace(json.dumps(REMOTE).encode(), b'"data:new"'))
    chat_body = chat(image(REMOTE, detail="high"), TEXT)
    assert json.loads(replace_urls(chat_body, {REMOTE: PNG_URL})) == json.loads(chat(image(detail="high"), TEXT))


def test_replacing_image_urls_leaves_fields_outside_the_conversation_unchanged() -> None:
    body = chat(image(REMOTE))[:-1] + b', "seed": 123456789012345678901234567890, "x": 1.10}'
    assert b'"seed":123456789012345678901234567890,"x":1.10' in replace_urls(body, {REMOTE: "data:new"})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["image_url", "image", "low", PNG_URL, REMOTE]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "image_url", "url", "detail", "content", "output", "file_id"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["messages", "input"]), st.lists(values, max_size=3) | values))
def test_any_request_body_passes_the_image_check_or_is_rejected_with_400(content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    try:
        checked = check_images(body, LIMITS)
    except ApiError as error:
        assert error.status == 400
    else:
        assert checked.images.count == count_images(body) >= len(checked.remote)
        new_body = replace_urls(body, {image.url: PNG_URL for image in checked.remote})
        assert check_images(new_body, NO_FETCHES).remote == ()
