"""helexa-acp with the gateway: one session in each API format, with the model's data from the gateway."""

from pathlib import Path

import pytest

from clients.stack import Stack, get
from editors.recording_client import agent_in_memory, settings_for
from helexa.acp.config import WireApi


@pytest.mark.parametrize("wire_api", ["openai-chat", "openai-responses", "anthropic-messages"])
async def test_acp_agent_answers_and_cancels_prompts_through_the_gateway_in_each_api(
    wire_api: WireApi, stack: Stack, tmp_path: Path
):
    settings = settings_for(f"{stack.url}/v1", tmp_path, wire_api=wire_api, max_tokens=200)
    async with agent_in_memory(settings) as editor:
        await editor.initialize()
        session = await editor.new(tmp_path)
        await editor.request("session/set_config_option", sessionId=session, configId="model", value="default:small")
        stopped = await editor.prompt(session, "Say hello.")
        assert stopped in ("end_turn", "max_tokens")
        assert editor.text(session)
        usage = editor.updates(session, "usage_update")[-1]
        (entry,) = [entry for entry in get(f"{stack.url}/v1/models")["data"] if entry["id"] == "small"]
        assert usage["size"] == entry["limit"]["context"]
        assert 500 < usage["used"] < usage["size"]

        _, waiting = editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "Count on."}])
        count = len(editor.updates(session, "agent_message_chunk"))
        await editor.until(lambda: len(editor.updates(session, "agent_message_chunk")) > count)
        editor.notify("session/cancel", sessionId=session)
        assert (await waiting)["result"]["stopReason"] == "cancelled"
        stack.until_idle()
