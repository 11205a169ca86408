"""Translation of Messages API conversations into chat messages."""

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.anthropic.claude_code import REQUEST
from cortex.anthropic.request_builders import HI, PIXEL, PIXEL_PART, assistant, chat, messages, result, text, use, user
from helexa.core.errors import ApiError
from helexa.core.wire.chat_message import ChatMessage
from helexa.cortex.anthropic.request_settings_and_token_count import to_chat, to_prompt
from helexa.cortex.backends.chat_request import for_backend
from helexa.neuron.text.chat_template import ChatTemplate


def test_system_texts_are_joined_in_order_as_one_message() -> None:
    turns = [HI, {"role": "system", "content": " b "}, assistant(text("yes")), HI]
    turns.append({"role": "developer", "content": [text("c", cache_control={"type": "ephemeral"}), text("d\n")]})
    for first in ("a", [text("a", cache_control={"type": "ephemeral"})]):
        assert messages(*turns, system=first) == [
            {"role": "system", "content": "a\n\n b \n\nc\nd\n"},
            HI,
            {"role": "assistant", "content": "yes"},
            HI,
        ]
    assert messages(HI, system="") == messages(HI, system=[]) == [HI]


@pytest.mark.parametrize("content", ["", [], None, [text("")]])
def test_empty_conversation_is_rejected(content: Any) -> None:
    with pytest.raises(ApiError) as caught:
        messages({"role": "system", "content": content}, system="")
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_anthropic_body", "messages")


def test_billing_header_text_is_removed_from_the_system_prompt() -> None:
    line = "x-anthropic-billing-header: cc_version=2; cch=fa690;"
    assert messages(HI, system=[text(line), text("a")])[0]["content"] == "a"
    assert messages({"role": "user", "content": line})[0]["content"] == line


def test_tool_results_of_a_user_message_precede_its_text() -> None:
    calls = assistant(text("a"), use("1", "f", x=[1, {"é": None}]), text("b"), use("2", "g"))
    results = user(text("so?"), result("2", [text("p"), text("q")]), result("1", "r"), text("well?"))
    assert messages(HI, calls, results)[1:] == [
        {
            "role": "assistant",
            "content": "a\nb",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, {"é": None}]}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "2", "content": "p\nq"},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": "so?\nwell?"},
    ]


def test_consecutive_messages_with_one_role_are_merged_into_one_message() -> None:
    calls = [assistant(use("1", "f")), assistant({"type": "thinking", "thinking": "hm"}, text("and"), use("2", "g"))]
    results = [user(result("1", "r"), text("so?")), user(result("2", "s")), {"role": "system", "content": "be brief"}]
    prompt, question, turn, *others = messages(
        HI, {"role": "user", "content": ""}, user(text("there")), *calls, *results, {"role": "user", "content": "well?"}
    )
    assert (prompt["content"], question) == ("be brief", {"role": "user", "content": "Hi\nthere"})
    assert (turn["content"], turn["reasoning_content"]) == ("and", "hm")
    assert [call["id"] for call in turn["tool_calls"]] == ["1", "2"]
    assert others == [
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": "s"},
        {"role": "user", "content": "so?\nwell?"},
    ]


def test_error_in_merged_messages_names_the_original_message() -> None:
    with pytest.raises(ApiError) as caught:
        messages(HI, user(text("a"), {"type": "tool_use", "id": "1", "name": "f", "input": {}}))
    assert caught.value.param == "messages.1.content.1"


def test_tool_results_that_are_errors_images_or_empty_are_translated() -> None:
    (error, image, nothing) = messages(
        user(
            result("1", "late", is_error=True),
            result("2", [text("see"), PIXEL]),
            {"type": "tool_result", "tool_use_id": ""},
        )
    )
    assert error["content"] == "Error:\nlate"
    assert image["content"] == [text("see"), PIXEL_PART]
    assert nothing == {"role": "tool", "tool_call_id": "toolu_unknown", "content": ""}


def test_images_and_documents_become_content_parts() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    page = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "page"}}
    album = {"type": "document", "source": {"type": "content", "content": [text("leaf"), PIXEL]}}
    search_result = {"type": "search_result", "title": "S", "source": "https://s", "content": [text("hit")]}
    (turn,) = messages(user(text("a"), url, page, album, search_result))
    linked = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    texts = [text(line) for line in ("T", "page", "leaf")]
    assert turn["content"] == [text("a"), linked, *texts, PIXEL_PART, text("S"), text("https://s"), text("hit")]
    assert all(ChatMessage.model_validate(turn).content == turn["content"] for turn in messages(user(PIXEL)))
    assert messages(user(page)) == [{"role": "user", "content": "T\npage"}]


def test_thinking_blocks_become_reasoning_and_unknown_blocks_become_json_text() -> None:
    thoughts = [{"type": "thinking", "thinking": thought, "signature": "x"} for thought in ("hm", "", "ah")]
    hidden = {"type": "redacted_thinking", "data": "zzz"}
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}, "cache_control": {}}
    (_, turn, _) = messages(HI, assistant(*thoughts, hidden, search), HI)
    assert turn["reasoning_content"] == "hm\nah"
    assert orjson.loads(turn["content"]) == {name: search[name] for name in ("type", "id", "name", "input")}


def test_final_assistant_text_sets_continue_final_message() -> None:
    chat_request = chat(messages=[HI, {"role": "assistant", "content": "The answer is ("}])
    assert chat_request["chat_template_kwargs"]["continue_final_message"] is True
    assert chat_request["chat_template_kwargs"]["add_generation_prompt"] is False
    for last in (HI, assistant(use("1", "f")), {"role": "assistant", "content": ""}):
        assert "continue_final_message" not in chat(messages=[HI, last])["chat_template_kwargs"]


# Claude Code

HERMES = """
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system message must come first') }}{% endif %}
{%- if m.role != 'system' or not tools %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}
<tool_call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }};
{%- endfor %}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"""


def test_recorded_claude_code_request_renders_completely_in_a_chat_template() -> None:
    chat_request = to_chat(REQUEST)
    prompt = ChatTemplate(HERMES).render(
        chat_request["messages"], tools=chat_request["tools"], **chat_request["chat_template_kwargs"]
    )
    head, *turns = prompt.split("<|im_start|>")[1:]
    assert head.startswith(
        "system\nYou are Claude Code.\nBe concise.\n\n# Tone \n\nThe plan mode is off.\n\n"
        "Tools may be called in parallel.\n"
    )
    assert '"name": "Bash"' in head and '"timeout"' in head and '"file_path"' in head
    assert "cache_control" not in prompt and "x-anthropic" not in prompt
    assert turns == [
        "user\n<system-reminder>\nToday is Monday.\n</system-reminder>\nList the files.<|im_end|>\n",
        "assistant\n<think>I should run ls.</think>I'll look.<tool_call>Bash command=ls; timeout=5;</tool_call>"
        "<tool_call>Read file_path=/a.txt;</tool_call><|im_end|>\n",
        "tool\na.txt\nb.txt<|im_end|>\n",
        "tool\nError:\n<tool_use_error>No such file</tool_use_error><|im_end|>\n",
        "user\n<system-reminder>Mind the todo list.</system-reminder><|im_end|>\n",
        "assistant\n",
    ]
    assert chat_request["max_tokens"] == 32000
    assert not {"context_management", "betas", "service_tier", "metadata", "thinking", "system"} & chat_request.keys()
    assert to_prompt(REQUEST)["messages"] == chat_request["messages"]


# Any conversation

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).map(lambda word: f"<{word}>")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(WORDS, children, max_size=3),
    max_leaves=6,
)
TEXTS = WORDS.map(text)
THOUGHTS = WORDS.map(lambda thought: {"type": "thinking", "thinking": thought, "signature": ""})
USES = st.builds(lambda call_id, name, value: use(call_id, name, x=value), WORDS, WORDS, JSON)
RESULTS = st.builds(result, WORDS, WORDS | st.lists(TEXTS, max_size=2))
TURNS = st.one_of(
    st.builds(
        lambda content: {"role": "user", "content": content}, WORDS | st.lists(TEXTS | st.just(PIXEL), max_size=4)
    ),
    st.lists(TEXTS | USES | THOUGHTS, max_size=4).map(lambda content: assistant(*content)),
    st.lists(TEXTS | RESULTS, max_size=4).map(lambda content: user(*content)),
    st.builds(lambda content: {"role": "system", "content": content}, WORDS),
)


def strings(value: Any) -> list[str]:
    """Return all strings in a JSON value, without the keys of objects."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [string for item in items for string in strings(item)]


@given(st.lists(TURNS, min_size=1, max_size=6))
def test_translation_of_any_conversation_loses_no_text_and_no_tool_call(turns: list[dict[str, Any]]) -> None:
    chat_request = messages(*turns)
    blocks = [block for turn in turns if isinstance(turn["content"], list) for block in turn["content"]]
    prompt_text = "\0".join(strings(chat_request))
    for turn in turns:
        if isinstance(turn["content"], str):
            assert turn["content"] in prompt_text
    for block in blocks:
        for word in strings([block.get(name) for name in ("text", "thinking", "content")]):
            assert word in prompt_text or word == "text"  # also the type of a block
    uses = [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    calls = [call for turn in chat_request for call in turn.get("tool_calls", ())]
    assert [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls] == uses
    results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    assert [turn["tool_call_id"] for turn in chat_request if turn["role"] == "tool"] == results
    roles = [turn["role"] for turn in chat_request]
    assert roles[1:].count("system") == 0
    assert all(first != second or first == "tool" for first, second in pairwise(roles))


@given(st.lists(TURNS, min_size=1, max_size=6))
def test_third_party_backend_gets_tool_call_arguments_as_text(turns: list[dict[str, Any]]) -> None:
    chat_request = chat(messages=turns)
    strict = orjson.loads(for_backend(orjson.dumps(chat_request), ()))
    for turn in strict["messages"]:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = orjson.loads(call["function"]["arguments"])
    variables = chat_request["chat_template_kwargs"]
    endings = {
        name: variables.pop(name) for name in ("add_generation_prompt", "continue_final_message") if name in variables
    }
    assert strict == chat_request | endings
