"""Images in prompts of the library: files, bytes and URLs become image parts of the last message."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import helexa

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
GIF = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def inline(data: bytes, kind: str = "png") -> dict[str, Any]:
    return part(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a picture.jpg"  # the format is that of the contents, not of the name
    path.write_bytes(PNG)
    return path


def test_images_precede_the_text_in_the_request(gateway, picture):
    images = [picture, str(picture), GIF, "https://example.com/a.png", "data:image/webp;base64,UklGRg=="]
    helexa.generate("What is it?", images=images, target=gateway.url, model="m")
    content = gateway.requests[-1]["messages"][-1]["content"]
    assert content[:3] == [inline(PNG), inline(PNG), inline(GIF, "gif")]
    assert content[3:] == [part("https://example.com/a.png"), part("data:image/webp;base64,UklGRg=="), TEXT]


def test_images_are_added_to_the_last_message_of_a_conversation(gateway):
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [TEXT, inline(GIF, "gif")]},
    ]
    helexa.generate(talk, images=[PNG], system="Be brief.", target=gateway.url, model="m")
    sent = gateway.requests[-1]["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]
    assert sent[1]["content"] == "Hi"
    assert sent[-1]["content"] == [inline(PNG), TEXT, inline(GIF, "gif")]
    assert len(talk[-1]["content"]) == 2
    with pytest.raises(helexa.InvalidRequestError, match="ends with a message of the user"):
        helexa.generate(talk[:2], images=[PNG], target=gateway.url, model="m")


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        (["missing.png"], "missing.png: No such file"),
        (["."], ": Is a directory"),
        ([__file__], "test_images.py is not a PNG, JPEG, WebP or GIF file"),
        ([b""], "the image is not a PNG"),
        ([5], "an image must be a path, a URL or bytes, not int"),
        ("a.png", "images is a list of images"),
        (PNG, "images is a list of images"),
    ],
)
def test_invalid_images_are_rejected_without_a_request_to_the_server(gateway, images, problem):
    with pytest.raises(helexa.InvalidRequestError, match=problem):
        helexa.generate("What is it?", images=images, target=gateway.url, model="m")
    assert gateway.requests == []


def test_prompt_file_names_images_relative_to_its_folder(gateway, picture, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "What is it?", "images": [picture.name]},
        {"prompt": "What is it?"},
        {"prompt": "What is it?", "images": ["missing.png"]},
        {"prompt": "What is it?", "images": [5]},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    results = tmp_path / "results.jsonl"
    options: Any = {"target": gateway.url, "model": "m", "max_parallel": 1}
    summary = helexa.batch_file(prompts, results, **options)
    assert (summary.finished, summary.failed) == (2, 2)
    sent = [request["messages"][-1]["content"] for request in gateway.requests]
    assert sent == [[inline(PNG), TEXT], "What is it?"]
    errors = [json.loads(line).get("error") for line in results.read_text().splitlines()]
    assert "missing.png: No such file" in str(errors[2])
    assert "'images' must be a list of paths or URLs" in str(errors[3])
    assert helexa.batch_file(prompts, results, **options).kept == 2
    picture.write_bytes(GIF)  # another image is another prompt
    with pytest.raises(helexa.InvalidRequestError):
        helexa.batch_file(prompts, results, **options)


def test_error_of_an_image_rejected_by_the_server_has_the_servers_code(gateway):
    envelope = {"error": {"message": "model 'm' reads text only", "code": "vision_unsupported"}}
    gateway.error_response = (400, {}, envelope)
    with pytest.raises(helexa.InvalidRequestError, match="reads text only") as rejected:
        helexa.generate("What is it?", images=[PNG], target=gateway.url, model="m")
    assert rejected.value.code == "vision_unsupported"
