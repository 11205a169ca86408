"""The agent loop: requests, tool calls, emitted events, committed messages, errors and cancellation."""

import asyncio
import json

import pytest

from helexa.acp.conversation_and_events import (
    AssistantMessage,
    CallChanged,
    CallStarted,
    PlanChanged,
    ThoughtDelta,
    ToolCall,
    ToolResult,
    UserMessage,
)
from helexa.acp.providers.requests_and_events import ProviderError
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Call, Reject, Say
from scripted.wire_formats import APIS

every_api = pytest.mark.parametrize("api", APIS)


@every_api
async def test_agent_loop_emits_the_events_of_a_round_and_stores_its_messages(stage, api):
    look = Say("I look.", thought="hm", calls=(Call("read_file", {"path": "a.txt"}), Call("list_dir", {"path": "."})))
    async with ScriptedEndpoint(look, Say("It says hi.", tokens=(300, 20))) as endpoint:
        actor = await stage(endpoint, wire_api=api)
        (actor.turn.context.cwd / "a.txt").write_text("hi\n")
        assert await actor.prompt("Read a.txt") == "end_turn"
    user, first, read, listed, last = actor.messages
    assert isinstance(user, UserMessage)
    assert (first.text, first.reasoning, [call.name for call in first.calls]) == (
        "I look.",
        "hm",
        ["read_file", "list_dir"],
    )
    assert "hi" in read.content
    assert [read.call_id, listed.call_id] == [call.id for call in first.calls]
    assert (last.text, last.calls, last.partial) == ("It says hi.", (), False)
    started = [event for event in actor.events if isinstance(event, CallStarted)]
    assert [(event.call_id, event.status) for event in started] == [(call.id, "pending") for call in first.calls]
    statuses = [
        event.status
        for event in actor.events
        if isinstance(event, CallChanged) and event.call_id == first.calls[0].id and event.status
    ]
    assert statuses == ["in_progress", "completed"]
    assert {event.message_id for event in actor.events if isinstance(event, ThoughtDelta)} == {first.id}
    assert [usage.used for usage in actor.usages] == [120, 320]


async def test_tool_calls_that_only_read_run_concurrently_and_others_in_order(stage, monkeypatch):
    async with ScriptedEndpoint(
        Say(
            calls=(
                Call("read_file", {"path": "a"}),
                Call("read_file", {"path": "b"}),
                Call("bash", {"command": "echo 1 >> order"}),
                Call("bash", {"command": "echo 2 >> order; cat order"}),
                Call("read_file", {"path": "order"}),
            )
        ),
        Say("done"),
    ) as endpoint:
        actor = await stage(endpoint)
        for name in ("a", "b"):
            (actor.turn.context.cwd / name).write_text(name)
        together = asyncio.Barrier(2)
        read = actor.turn.toolbox.find("read_file")

        async def together_or_never(path, **options):
            if path.name in ("a", "b"):
                await together.wait()
            return path.read_text()

        monkeypatch.setattr(actor.turn.context.host, "read_text", together_or_never)
        assert await actor.prompt("go") == "end_turn"
    assert read is not None
    assert "1\n2" in actor.messages[5].content
    assert "1" in actor.messages[6].content


async def test_repeated_tool_call_ids_are_made_unique(stage):
    second_call = [Say(calls=(Call("list_dir", {"path": "."}),)), Say("ok")]
    async with ScriptedEndpoint(*second_call, *second_call) as endpoint:
        actor = await stage(endpoint)
        await actor.prompt("a")
        first = actor.messages[1].calls[0]
        actor.messages[1:3] = [
            AssistantMessage("x", calls=(ToolCall("call_3_0", "list_dir", "{}"),)),
            ToolResult("call_3_0", "old"),
        ]
        await actor.prompt("b")
    second_call = next(message for message in actor.messages[4:] if isinstance(message, AssistantMessage)).calls[0]
    assert first.id == "call_1_0"
    assert second_call.id not in ("call_1_0", "call_3_0")


@every_api
async def test_cancel_closes_the_stream_and_stores_the_partial_answer(stage, api):
    async with ScriptedEndpoint(Say("so far " * 9, hold_after=6), Say("again")) as endpoint:
        actor = await stage(endpoint, wire_api=api)
        turn = asyncio.create_task(actor.prompt("go"))
        await endpoint.holding.wait()
        await actor.speaking.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await endpoint.hung_up.wait()
        assert actor.messages[-1].partial
        assert actor.messages[-1].text.startswith("so far")
        assert await actor.prompt("go on") == "end_turn"
    assert actor.text.endswith("again")


async def test_cancel_during_a_tool_call_leaves_a_history_with_a_result_of_each_call(stage):
    calls = (Call("bash", {"command": "echo begun > begun; sleep 600"}), Call("bash", {"command": "touch never"}))
    async with ScriptedEndpoint(Say(calls=calls), Say("fine")) as endpoint:
        actor = await stage(endpoint)
        cwd = actor.turn.context.cwd
        turn = asyncio.create_task(actor.prompt("go"))
        await actor.running.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert [status for status, _ in actor.endings] == ["failed", "failed"]
        assert [type(message) for message in actor.messages[1:]] == [AssistantMessage, ToolResult, ToolResult]
        assert not (cwd / "never").exists()
        assert await actor.prompt("go on") == "end_turn"
    assert [entry[0] for entry in endpoint.requests[1].conversation] == [
        "user",
        "call",
        "call",
        "result",
        "result",
        "user",
    ]


@every_api
async def test_broken_stream_fails_the_turn_and_runs_no_tool_call(stage, api):
    within_the_call = 10  # in each API
    dying = Say("I will now " * 3, calls=(Call("bash", {"command": "touch never"}),), cut_after=within_the_call)
    async with ScriptedEndpoint(dying, Say("back")) as endpoint:
        actor = await stage(endpoint, wire_api=api)
        with pytest.raises(ProviderError, match="closed the connection during the answer"):
            await actor.prompt("go")
        assert actor.messages[-1].partial
        assert actor.messages[-1].calls == ()
        assert await actor.prompt("go on") == "end_turn"
        assert not (actor.turn.context.cwd / "never").exists()
    assert actor.text.endswith("back")


async def test_endpoint_error_fails_the_turn_and_hides_the_key(stage):
    refused = Reject(401, {"error": {"message": "invalid API key sk-secret", "code": "invalid_api_key"}})
    async with ScriptedEndpoint(refused, Say("better")) as endpoint:
        actor = await stage(endpoint, api_key="sk-secret")
        with pytest.raises(ProviderError, match="rejected the API key") as refused:
            await actor.prompt("a")
        assert "sk-secret" not in actor.text + str(actor.notices) + str(refused.value)
        assert await actor.prompt("b") == "end_turn"
    assert actor.text.endswith("better")
    assert len(actor.messages) == 3


async def test_request_to_a_busy_endpoint_is_retried_with_notices_to_the_user(stage):
    busy = [
        Reject(429, {"error": {"message": "slow down"}}, {"retry-after": "0"}),
        Reject(503, {"error": {"message": "loading", "code": "service_unavailable"}}, {"retry-after": "0"}),
        Reject(529, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, {"retry-after": "0"}),
    ]
    async with ScriptedEndpoint(*busy, Say("here")) as endpoint:
        actor = await stage(endpoint)
        assert await actor.prompt("a") == "end_turn"
    assert actor.text == "here"
    assert len(actor.notices) == 3
    assert "slow down. Retrying in 0 s." in actor.notices[0]


async def test_requests_to_a_busy_endpoint_are_given_up_after_some_retries(stage):
    busy = Reject(503, {"error": {"message": "loading"}}, {"retry-after": "0"})
    async with ScriptedEndpoint(*[busy] * 50) as endpoint:
        actor = await stage(endpoint)
        with pytest.raises(ProviderError, match="loading"):
            await actor.prompt("a")
        assert len(endpoint.requests) == 11
        endpoint.script[:] = [Reject(429, {"error": {"message": "tomorrow"}}, {"retry-after": "86400"})]
        with pytest.raises(ProviderError, match="tomorrow"):
            await actor.prompt("b")
    assert len(endpoint.requests) == 12


async def test_malformed_tool_calls_return_errors_to_the_model(stage):
    bad = (Call("read_file", '{"path": "a"'), Call("nope"), Call("read_file", {"path": 5, "x": 1}), Call("bash", "[1]"))
    async with ScriptedEndpoint(Say(calls=bad), Say("ok")) as endpoint:
        actor = await stage(endpoint)
        assert await actor.prompt("go") == "end_turn"
    assert [status for status, _ in actor.endings] == ["failed"] * 4
    outputs = [output for _, output in actor.endings]
    assert "could not be read" in outputs[0]
    assert '"path"' in outputs[0]
    assert "there is no tool 'nope'; your tools are: read_file" in outputs[1]
    assert outputs[2].startswith("ERROR: ")
    assert all(isinstance(json.loads(call.arguments), dict) for call in actor.messages[1].calls)


async def test_tool_calls_written_as_text_are_run_if_the_endpoint_has_no_tools(stage):
    no_tools = Reject(400, {"error": {"message": "scripted does not support tools"}})
    call = "<tool_call>\n<function=write_file>\n<parameter=path>\nx\n</parameter>\n<parameter=content>\n1\n</parameter>"
    bad = '<tool_call>{"path": "x"}</tool_call>'
    async with ScriptedEndpoint(no_tools, Say(f"I write.\n{call}</function></tool_call>{bad}"), Say("ok")) as endpoint:
        actor = await stage(endpoint)
        assert await actor.prompt("go") == "end_turn"
        assert (actor.turn.context.cwd / "x").read_text() == "1"
    assert [status for status, _ in actor.endings] == ["completed", "failed"]
    started = [event for event in actor.events if isinstance(event, CallStarted)]
    assert [event.card.title for event in started] == ["write_file", "Malformed tool call"]


async def test_turn_ends_at_the_limit_of_model_requests(stage):
    async with ScriptedEndpoint(*[Say(calls=(Call("list_dir", {"path": "."}),))] * 30) as endpoint:
        actor = await stage(endpoint)
        assert await actor.prompt("go") == "max_turn_requests"
        assert len(endpoint.requests) == 25
        assert actor.notices
        actor = await stage(endpoint, max_rounds=3)
        assert await actor.prompt("go") == "max_turn_requests"
        assert len(endpoint.requests) == 28


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_tokens"), ("refusal", "refusal"), ("stop", "end_turn")])
async def test_stop_reason_of_a_turn_follows_the_finish_reason_of_the_model(stage, finish, reason):
    async with ScriptedEndpoint(Say("a", finish=finish), Say("", thought="x", finish=finish)) as endpoint:
        actor = await stage(endpoint)
        assert await actor.prompt("go") == reason
        assert not actor.notices
        assert await actor.prompt("go") == reason
        assert "gave no answer" in actor.notices[0]


async def test_tasks_of_the_todo_tool_are_emitted_as_a_plan(stage):
    tasks = [{"content": "look", "status": "completed", "priority": "high"}, {"content": "mend"}]
    async with ScriptedEndpoint(Say(calls=(Call("todo", {"tasks": tasks}),)), Say("ok")) as endpoint:
        actor = await stage(endpoint)
        await actor.prompt("go")
    (plan,) = [event for event in actor.events if isinstance(event, PlanChanged)]
    assert [(entry.content, entry.status) for entry in plan.entries] == [("look", "completed"), ("mend", "pending")]


async def test_tool_call_that_the_user_rejects_is_not_run(stage):
    async with ScriptedEndpoint(Say(calls=(Call("bash", {"command": "touch no"}),)), Say("ok")) as endpoint:
        actor = await stage(endpoint, "default")
        actor.verdict = "reject_once"
        assert await actor.prompt("go") == "end_turn"
        assert not (actor.turn.context.cwd / "no").exists()
    assert actor.endings[0][0] == "failed"
    assert "did not allow" in actor.endings[0][1]


async def test_permission_mode_is_read_again_in_each_turn(stage):
    plan = Say(calls=(Call("bash", {"command": "touch no"}),))
    async with ScriptedEndpoint(plan, Say("b"), Say("c")) as endpoint:
        actor = await stage(endpoint, "plan")
        await actor.prompt("go")
        actor.turn.choices.mode = "default"
        await actor.prompt("go")
        assert not (actor.turn.context.cwd / "no").exists()
    assert "In plan mode" in actor.endings[0][1]
    assert "# Plan mode" in endpoint.requests[0].system
    assert "bash" not in endpoint.requests[0].tools
    assert "# Plan mode" not in endpoint.requests[2].system
    assert "bash" in endpoint.requests[2].tools


async def test_cost_of_a_turn_is_computed_from_the_model_prices(stage):
    priced = {"data": [{"id": "scripted", "limit": {"context": 100_000}, "cost": {"input": 1.0, "output": 10.0}}]}
    async with ScriptedEndpoint(Say("a", tokens=(1000, 100), cached=400), models=priced) as endpoint:
        actor = await stage(endpoint)
        await actor.prompt("go")
    (usage,) = actor.usages
    assert (usage.used, usage.size) == (1100, 100_000)
    assert usage.cost == pytest.approx(0.002)
