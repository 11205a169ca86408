"""The gateway rejects bodies that a web page of another site may send without permission."""

from typing import Any

import pytest

from cortex.running_gateway import Cortex

CHAT = b'{"model": "Org/M", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}'
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": b'{"model": "Org/M", "prompt": "Hi"}',
    "/v1/responses": b'{"model": "Org/M", "input": "Hi"}',
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": CHAT,
    "/api/session": b'{"key": "k"}',
}
CURL = "application/x-www-form-urlencoded"


async def send(cortex: Cortex, path: str, content_type: str | None) -> tuple[int, Any]:
    """Send the body of the route `path`. Without `content_type`, the request has no such header."""
    async with cortex.client.post(
        cortex.url + path,
        data=ROUTES[path],
        headers={} if content_type is None else {"content-type": content_type},
        skip_auto_headers=("content-type",),
    ) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("path", ROUTES)
async def test_request_body_of_another_content_type_than_json_is_415(cortex: Cortex, path: str) -> None:
    del cortex.client.headers["content-type"]
    for content_type in ("text/plain", CURL, "multipart/form-data; boundary=x", "", None):
        status, answer = await send(cortex, path, content_type)
        assert status == 415
        assert "send the header 'Content-Type: application/json'" in answer["error"]["message"]
        if path.startswith("/v1/messages"):
            assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        else:
            assert answer["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
async def test_json_content_types_are_accepted(cortex: Cortex, content_type: str) -> None:
    status, answer = await send(cortex, "/v1/chat/completions", content_type)
    assert status == 200, answer
