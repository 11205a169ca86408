"""The agent reads the whole answer of a backend with quirks, and no end that the backend did not send."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from emulator.backend import Backend
from emulator.quirk import Quirk
from emulator.table import QUIRKS

from helexa.acp.config import Endpoint, Settings
from helexa.acp.conversation_and_events import Text, UserMessage
from helexa.acp.providers.models import ModelChoice, Models
from helexa.acp.providers.requests_and_events import (
    AnswerDelta,
    CallDelta,
    End,
    ModelRequest,
    ProviderError,
    ReasoningDelta,
    ToolSpec,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [ToolSpec(name, "A tool.", {"type": "object"}) for name in ("add", "sub")]
# OpenAI's library reads the events: it reports these streams as errors, so no answer is taken for complete.
REPORTED = ("events without an empty line between them", "a whole answer to a streaming request")
STREAMED = {name: quirk for name, quirk in QUIRKS.items() if quirk.stream}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models() -> AsyncIterator[Models]:
    async with Backend(QUIRKS).serving() as backend:
        endpoint = Endpoint(name="e", base_url=f"{backend.url}/v1", wire_api="openai-chat")
        models = Models(Settings(endpoints=(endpoint,), default_endpoint="e"))
        try:
            yield models
        finally:
            await models.close()


@pytest.mark.parametrize(("name", "quirk"), STREAMED.items(), ids=map(str, STREAMED.values()))
async def test_recorded_streams_of_third_party_servers_give_the_expected_text_and_tool_calls(
    models: Models, name: str, quirk: Quirk
) -> None:
    provider = await models.provider(ModelChoice("e", name))
    text, reasoning, end = "", "", None
    calls: dict[int, list[str]] = {}
    try:
        async for event in provider.stream(ModelRequest(name, "", [UserMessage("1", (Text("Hi"),))], TOOLS)):
            match event:
                case AnswerDelta(delta):
                    text += delta
                case ReasoningDelta(delta):
                    reasoning += delta
                case CallDelta(index, _, tool, arguments):
                    call = calls.setdefault(index, ["", ""])
                    call[0] += tool or ""
                    call[1] += arguments
                case End(reason=reason):
                    end = {"refusal": "content_filter"}.get(reason, reason)
                case _:
                    pass
    except ProviderError:
        assert quirk.seen.end == "error" or quirk.name in REPORTED
        return
    assert end == quirk.seen.end
    assert (text, reasoning) == (quirk.seen.text, quirk.seen.reasoning)
    assert [(tool, json.loads(arguments)) for tool, arguments in calls.values()] == list(quirk.seen.calls)
