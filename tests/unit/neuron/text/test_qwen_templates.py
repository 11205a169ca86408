"""The templates of Qwen3.6 and Qwen3.8, made from Qwen3.5's by the changes that their publishers describe."""

import pytest

from helexa.neuron.text.chat_template import ChatTemplate

CONDITION = "{%- if loop.index0 > ns.last_query_index %}"
EFFORT = (
    "{%- set effort = reasoning_effort | default('xhigh') %}{%- if effort not in ('xhigh', 'medium', 'low') %}"
    "{{- raise_exception('Unexpected reasoning effort ' ~ effort) }}{%- endif %}{{- '<' ~ effort ~ '>' }}"
)
CONVERSATION = [
    {"role": "user", "content": "Six times seven?"},
    {"role": "assistant", "content": "42", "reasoning_content": "Six sevens."},
    {"role": "user", "content": "Again?"},
]


@pytest.fixture
def qwen3_6(templates: dict[str, str]) -> ChatTemplate:
    source = templates["Qwen3.5-4B"]
    assert source.count(CONDITION) == 1
    kept = "{%- if (preserve_thinking is defined and preserve_thinking is true) or loop.index0 > ns.last_query_index %}"
    return ChatTemplate(source.replace(CONDITION, kept))


@pytest.fixture
def qwen3_8(templates: dict[str, str]) -> ChatTemplate:
    kept = "{%- if preserve_thinking is undefined or preserve_thinking or loop.index0 > ns.last_query_index %}"
    return ChatTemplate(EFFORT + templates["Qwen3.5-4B"].replace(CONDITION, kept))


def test_preserve_thinking_decides_whether_earlier_reasoning_is_rendered(qwen3_6: ChatTemplate, qwen3_8: ChatTemplate):
    kept = "<think>\nSix sevens.\n</think>\n\n42"
    assert kept not in qwen3_6.render(CONVERSATION)
    assert kept in qwen3_6.render(CONVERSATION, preserve_thinking=True)
    assert kept in qwen3_8.render(CONVERSATION)
    assert kept not in qwen3_8.render(CONVERSATION, preserve_thinking=False)


@pytest.mark.parametrize(
    ("requested", "passed"),
    [
        ("none", "low"),
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "medium"),
        ("high", "xhigh"),
        ("xhigh", "xhigh"),
        ("max", "xhigh"),
    ],
)
def test_requested_reasoning_effort_becomes_the_nearest_that_the_template_accepts(
    qwen3_8: ChatTemplate, requested: str, passed: str
):
    assert qwen3_8.render(CONVERSATION, reasoning_effort=requested).startswith(f"<{passed}>")


def test_reasoning_effort_is_unchanged_if_the_template_names_no_levels(templates: dict[str, str]):
    template = ChatTemplate("{{ reasoning_effort }}")
    assert template.render(CONVERSATION, reasoning_effort="high") == "high"
    assert template.render(CONVERSATION, reasoning_effort="hard") == "hard"


@pytest.mark.parametrize("thinks", [True, False])
def test_tool_calls_and_results_are_rendered_with_and_without_reasoning(qwen3_8: ChatTemplate, thinks: bool):
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "Rome"}'}}
    turns = [CONVERSATION[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "call_1", "content": "noon"})
    prompt = qwen3_8.render(turns, tools=[call | {"function": {"name": "clock"}}], enable_thinking=thinks)
    assert "<tool_call>\n<function=clock>\n<parameter=zone>\nRome\n</parameter>\n</function>\n</tool_call>" in prompt
    assert "<tool_response>\nnoon\n</tool_response>" in prompt
    assert prompt.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\n")
