"""Too long conversations: shortened messages, compaction, and context limits learned from the endpoint."""

import asyncio

import pytest

from helexa.acp.agent.context_and_compaction import compact, fit_messages, tokens, visible
from helexa.acp.agent.system_prompt_and_request import RequestBuilder
from helexa.acp.conversation_and_events import (
    AssistantMessage,
    Cleared,
    Image,
    Summary,
    Text,
    ToolCall,
    ToolResult,
    UserMessage,
)
from helexa.acp.providers.models import ModelChoice
from helexa.acp.providers.requests_and_events import ProviderError
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Reject, Say


def user(id, text="hi"):
    return UserMessage(id, (Text(text),))


def calling(id, *calls):
    return AssistantMessage(id, "", calls=tuple(ToolCall(call, "read_file", "{}") for call in calls))


def of_size(context):
    return {"data": [{"id": "scripted", "limit": {"context": context}}]}


OF_UNKNOWN_SIZE = {"data": [{"id": "scripted"}]}


def test_messages_that_were_cleared_or_summarized_are_not_sent_to_the_model():
    a, b, c, d = (user(id) for id in "abcd")
    assert visible([a, Cleared("x"), b]) == [b]
    (head, *rest) = visible([a, b, c, Summary("s", "all", kept=1), d])
    assert head.hidden
    assert head.parts[0].text.endswith("all")
    assert rest == [c, d]
    twice_compacted = visible([a, b, Summary("s", "one", kept=1), c, Summary("t", "two", kept=2), d])
    assert [message.id for message in twice_compacted] == ["t", "b", "c", "d"]
    assert visible([a, Summary("s", "all"), Cleared("x")]) == []


def test_messages_kept_by_a_summary_are_counted_without_responses_of_only_reasoning():
    a, b, c = (user(id) for id in "abc")
    history = [a, b, AssistantMessage("r", reasoning="x"), c]
    assert visible([*history, Summary("s", "all", kept=2)])[1:] == visible(history)[-2:] == [b, c]


def test_history_sent_to_the_model_has_one_result_for_each_tool_call():
    unmatched, matched = ToolResult("lost", "x"), ToolResult("2", "y")
    view = visible(
        [
            unmatched,
            user("a"),
            calling("b", "1", "2"),
            matched,
            matched,
            user("c"),
            AssistantMessage("d", reasoning="x"),
        ]
    )
    assert [type(message) for message in view] == [UserMessage, AssistantMessage, ToolResult, ToolResult, UserMessage]
    assert view[2] is matched
    assert view[3].failed


def test_function_fit_messages_shortens_tool_results_first_and_then_answers():
    long = "x" * 7000
    history = [
        user("u", long),
        *(
            message
            for index in range(30)
            for message in (
                AssistantMessage(f"a{index}", long, calls=(ToolCall(f"c{index}", "read_file", "{}"),)),
                ToolResult(f"c{index}", long, images=(Image("image/png", ""),)),
            )
        ),
    ]
    all_tokens = tokens(history)
    assert fit_messages(history, all_tokens) == history
    slightly = fit_messages(history, all_tokens - 1)
    changed = [index for index, message in enumerate(history) if slightly[index] != message]
    assert changed == [2, 4, 6, 8, 10, 12, 14, 16]  # in eights
    assert "7000 bytes" in slightly[2].content
    assert tokens(fit_messages(history, all_tokens / 3)) <= all_tokens / 3
    least = fit_messages(history, 0)
    assert least[0] == history[0]
    assert least[-4:] == history[-4:]
    assert all("were removed" in message.text for message in least[1:-4:2])


async def test_conversation_too_long_for_the_context_is_compacted(stage):
    async with ScriptedEndpoint(Say("THE SUMMARY"), Say("answer 5"), models=of_size(8192)) as endpoint:
        actor = await stage(endpoint)
        for index in range(5):
            actor.messages.append(user(f"u{index}", f"question {index} " + "why " * 900))
            actor.messages.append(AssistantMessage(f"a{index}", f"answer {index} " + "word " * 900))
        assert await actor.prompt("question 5") == "end_turn"
    started, completed = actor.compactions
    assert (started.status, completed.status) == ("in_progress", "completed")
    assert completed.summary.startswith("THE SUMMARY")
    task_of_summary, request_after = endpoint.requests
    assert "question 0" in task_of_summary.conversation[0][1]
    assert task_of_summary.tools == []
    assert len(task_of_summary.conversation[0][1]) / 3.5 < 8192
    assert "THE SUMMARY" in request_after.conversation[0][1]
    assert "question 5" in request_after.conversation[-1][1]
    assert "question 0" not in str(request_after.conversation)
    assert isinstance(actor.messages[-2], Summary)
    assert actor.text == "answer 5"


async def test_summary_request_of_a_long_conversation_fits_a_small_context(stage):
    async with ScriptedEndpoint(models=of_size(4096)) as endpoint:
        actor = await stage(endpoint)
        actor.messages += [user("a", "begin " * 40_000), AssistantMessage("b", "fine"), user("c", "end " * 300)]
        endpoint.script[:] = [Say("SHORT"), Say("ok")]
        assert await actor.prompt("and now?") == "end_turn"
    assert actor.text == "ok"
    task_of_summary, request_after = endpoint.requests
    assert len(str(task_of_summary.body)) / 3.5 < 4096
    assert len(str(request_after.conversation)) / 3.5 < 4096


@pytest.mark.parametrize(
    ("message", "learned"),
    [
        ("This model's maximum context length is 4,096 tokens. However, you requested 9000", 4096),
        ("the request exceeds the available context size", None),
        ("prompt is too long: 9000 tokens > 4096 maximum", 4096),
    ],
)
async def test_context_limit_error_of_the_endpoint_makes_the_agent_send_a_shorter_request(stage, message, learned):
    async with ScriptedEndpoint(models=OF_UNKNOWN_SIZE) as endpoint:
        actor = await stage(endpoint)
        actor.messages += [
            user("a"),
            calling("b", "1"),
            ToolResult("1", "text " * 8000),
            AssistantMessage("c", "d" * 9000),
        ]
        actor.messages += [user("e"), AssistantMessage("f", "so"), user("g"), AssistantMessage("h", "so")]
        refused = Reject(400, {"error": {"message": message}})
        endpoint.script[:] = [refused, Say("fits")]
        assert await actor.prompt("go on") == "end_turn"
        assert actor.turn.models.card(actor.turn.choices.model).context == learned
    assert actor.text == "fits"
    assert "were removed" in str(endpoint.requests[-1].conversation)


async def test_repeated_context_limit_errors_fail_the_turn(stage):
    refused = Reject(413, {"error": {"message": "too large"}})
    async with ScriptedEndpoint(*[refused] * 9, models=OF_UNKNOWN_SIZE) as endpoint:
        actor = await stage(endpoint)
        with pytest.raises(ProviderError, match="too long for the model"):
            await actor.prompt("go")
    assert len(endpoint.requests) < 9


async def test_prompt_larger_than_context_is_not_sent(stage):
    async with ScriptedEndpoint(Say("summary"), Say("never"), models=of_size(2048)) as endpoint:
        actor = await stage(endpoint)
        with pytest.raises(ProviderError, match="the context of e:scripted has 2048"):
            await actor.prompt("word " * 9000)
    assert all("never" not in text for text in (actor.text, str(actor.messages)))


async def test_request_after_a_switch_to_a_model_of_unknown_context_does_not_overflow(stage):
    models = {"data": [*of_size(2048)["data"], {"id": "unlimited"}]}
    async with ScriptedEndpoint(models=models) as endpoint:
        actor = await stage(endpoint)
        actor.messages.append(user("a", "word " * 9000))
        provider = await actor.turn.models.provider(actor.turn.choices.model)
        builder = RequestBuilder(actor.turn, "")
        builder.request(provider)
        assert builder.overflows
        actor.turn.choices.model = ModelChoice("e", "unlimited")
        builder.request(provider)
        assert not builder.overflows


async def test_compaction_on_demand_reports_success_failure_or_cancellation(stage):
    async with ScriptedEndpoint(
        Say("SUM"),
        Reject(400, {"error": {"message": "no"}}),
        Say("x", hold_after=1),
        models=OF_UNKNOWN_SIZE,
    ) as endpoint:
        actor = await stage(endpoint)
        assert not await compact(actor.turn)
        actor.messages += [user("a", "why " * 500), AssistantMessage("b", "so " * 500)]
        assert await compact(actor.turn, "mind the names")
        assert "mind the names" in endpoint.requests[0].system
        messages_before = list(actor.messages)
        actor.messages.append(user("c", "why " * 500))
        assert not await compact(actor.turn)
        assert actor.messages[:-1] == messages_before
        task_of_summary = asyncio.create_task(compact(actor.turn))
        await endpoint.holding.wait()
        task_of_summary.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task_of_summary
        await endpoint.hung_up.wait()
    states = [event.status for event in actor.compactions]
    assert states == ["in_progress", "completed", "in_progress", "failed", "in_progress", "cancelled"]
