"""Real chat templates render every form of a conversation that clients send like the canonical form."""

import json
import re
from typing import Any

import pytest

from helexa.core.wire.chat_message import ChatMessage
from helexa.neuron.text.chat_template import ChatTemplate, TemplateError
from nightly import NIGHTLY

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
WITHOUT_CALLS = {  # templates that cannot render a tool call, with or without `transformers`
    *("fireworks-ai-llama-3-firefunction-v2", "llama-cpp-deepseek-r1", "google-gemma-2-2b-it", "llama-cpp-rwkv-world"),
    *("microsoft-Phi-3.5-mini-instruct", "HuggingFaceTB-SmolLM3-3B", "LFM2.5-Instruct"),
}


def tool(name, parameter):
    schema = {"type": "object", "properties": {parameter: {"type": "string", "description": "d"}}}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


def call(number, name, arguments):
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def with_function(tool_call, **fields):
    return tool_call | {"function": tool_call["function"] | fields}


TOOLS = [tool("get_weather", "city"), tool("clock", "zone")]
SYSTEM = {"role": "system", "content": "SysText"}
USER = {"role": "user", "content": "UserOne"}
FIRST, SECOND = call(1, "get_weather", '{"city": "Zug"}'), call(2, "clock", '{"zone": "Rome"}')
CALLS = {"role": "assistant", "content": None, "tool_calls": [FIRST, SECOND]}
FIRST_RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "ResOne"}
SECOND_RESULT = {"role": "tool", "tool_call_id": "call00002", "content": "ResTwo"}
ANSWER = {"role": "assistant", "content": "AnsOne"}
LAST = {"role": "user", "content": "UserTwo"}


def conversation(*, system=SYSTEM, user=USER, calls=CALLS, results=(FIRST_RESULT, SECOND_RESULT), answer=ANSWER):
    return [system, user, calls, *results, answer, LAST]


def with_ids(first, second):
    calls = [FIRST | {"id": first}, SECOND | {"id": second}]
    results = [FIRST_RESULT | {"tool_call_id": first}, SECOND_RESULT | {"tool_call_id": second}]
    return conversation(calls=CALLS | {"tool_calls": calls}, results=results)


def parts(*texts, kind="text"):
    return [{"type": kind, "text": text} for text in texts]


NULLS = {
    **{"refusal": None, "audio": None, "function_call": None, "annotations": [], "reasoning": None, "parsed": None},
    **{"reasoning_content": "", "thinking": "", "name": None, "reasoning_details": [], "thinking_blocks": None},
}
FORMS = {
    "calls without content": conversation(calls=without(CALLS, "content")),
    "calls with empty content": conversation(calls=CALLS | {"content": ""}),
    "calls with blank content": conversation(calls=CALLS | {"content": "\n"}),
    "calls with an empty list": conversation(calls=CALLS | {"content": []}),
    "calls with an empty part": conversation(calls=CALLS | {"content": parts("")}),
    "calls with null fields": conversation(calls=CALLS | NULLS),
    "calls with arguments as objects": conversation(
        calls=CALLS
        | {
            "tool_calls": [
                with_function(one, arguments=json.loads(one["function"]["arguments"])) for one in CALLS["tool_calls"]
            ]
        }
    ),
    "calls with arguments encoded twice": conversation(
        calls=CALLS | {"tool_calls": [with_function(FIRST, arguments=json.dumps('{"city": "Zug"}')), SECOND]}
    ),
    "calls with fields of SDKs": conversation(
        calls=CALLS
        | {
            "tool_calls": [
                with_function(one | {"index": index}, parsed_arguments=None)
                for index, one in enumerate([FIRST, SECOND])
            ]
        }
    ),
    "calls without type": conversation(calls=CALLS | {"tool_calls": [without(one, "type") for one in (FIRST, SECOND)]}),
    "no calls: empty list": conversation(answer=ANSWER | {"tool_calls": []}),
    "no calls: null": conversation(answer=ANSWER | {"tool_calls": None}),
    "answer with null fields": conversation(answer=ANSWER | NULLS | {"tool_calls": None}),
    "answer as one part": conversation(answer=ANSWER | {"content": parts("AnsOne")}),
    "answer with empty parts": conversation(answer=ANSWER | {"content": parts("", "AnsOne", "")}),
    "answer as output_text": conversation(answer=ANSWER | {"content": parts("AnsOne", kind="output_text")}),
    "answer as refusal": conversation(answer={"role": "assistant", "content": None, "refusal": "AnsOne"}),
    "other roles with null fields": conversation(
        system=SYSTEM | {"name": None, "tool_calls": []}, user=USER | {"name": None, "tool_calls": []}
    ),
    "parts of other roles": conversation(
        system=SYSTEM | {"content": parts("SysText")}, user=USER | {"content": parts("UserOne", kind="input_text")}
    ),
    "results as parts": conversation(
        results=[one | {"content": parts(one["content"])} for one in (FIRST_RESULT, SECOND_RESULT)]
    ),
    "results with names": conversation(results=[FIRST_RESULT | {"name": "get_weather"}, SECOND_RESULT | {"name": ""}]),
    "results without ids": conversation(
        results=[without(one, "tool_call_id") for one in (FIRST_RESULT, SECOND_RESULT)]
    ),
    "results with empty ids": conversation(
        results=[FIRST_RESULT | {"tool_call_id": None}, SECOND_RESULT | {"tool_call_id": ""}]
    ),
    "results with unknown ids": conversation(
        results=[FIRST_RESULT | {"tool_call_id": "x1"}, SECOND_RESULT | {"tool_call_id": "x2"}]
    ),
    "results by name": conversation(
        results=[
            without(SECOND_RESULT, "tool_call_id") | {"name": "clock"},
            without(FIRST_RESULT, "tool_call_id") | {"name": "get_weather"},
        ]
    ),
    "results in another order": conversation(results=[SECOND_RESULT, FIRST_RESULT]),
    "no ids": conversation(
        calls=CALLS | {"tool_calls": [without(one, "id") for one in (FIRST, SECOND)]},
        results=[without(one, "tool_call_id") for one in (FIRST_RESULT, SECOND_RESULT)],
    ),
    "ids of OpenAI": with_ids("call_0123456789abcdef01234567", "call_0123456789abcdef01234568"),
    "ids of Anthropic": with_ids("toolu_01A09q90qw90lq917835lq9", "toolu_01A09q90qw90lq917835lq8"),
    "ids of the Responses API": with_ids("call_abc|fc_" + "0" * 60, "call_abc|fc_" + "1" * 60),
    "ids of Kimi": with_ids("functions.get_weather:0", "functions.clock:1"),
    "ids with thoughts": with_ids("call_1__thought__" + "Cq4B" * 500, "call_2__thought__" + "Cq4B" * 500),
    "ids with other characters": with_ids('a"}] é', "\n"),
    "equal ids": with_ids("call_0", "call_0"),
    "empty ids": with_ids("", ""),
}


@pytest.fixture(scope="module")
def models(templates):
    return {name: ChatTemplate(source, special_tokens=TOKENS) for name, source in templates.items()}


def render(template, messages, tools=TOOLS):
    return template.render([ChatMessage.model_validate(message).for_template() for message in messages], tools=tools)


@pytest.fixture(scope="module")
def canonical(models):
    """The prompts of the canonical conversation, by template."""
    return {name: render(model, conversation()) for name, model in models.items() if name not in WITHOUT_CALLS}


def pattern(prompt):
    """Return a pattern that matches `prompt` with other ids, which must be equal in a call and its result."""
    text = re.escape(prompt)
    for number in "12":
        head, *tails = text.split(f"call0000{number}")
        ids = [rf"(?P<id{number}>[\w.:|-]+)", *[f"(?P=id{number})"] * len(tails)]
        text = head + "".join(id + tail for id, tail in zip(ids, tails, strict=False))
    return re.compile(text, re.DOTALL)


def pairs(templates, cases):
    """Yield the pairs of a template and a case that this run renders; `make nightly` renders all pairs.

    Each template renders a third of the cases, and each case is rendered by templates of most model families.
    A template renders all its cases in a row, because a template process keeps only few compiled templates.
    """
    for place, name in enumerate(sorted(templates)):
        for number, case in enumerate(cases):
            if NIGHTLY or number % 3 == place % 3:
                yield name, case


def test_equivalent_forms_of_a_conversation_render_the_same_prompt_in_each_template(models, canonical):
    different = []
    for name, form in pairs(canonical, FORMS):
        prompt = canonical[name]
        assert all(word in prompt for word in ("UserOne", "get_weather", "Zug", "ResOne", "ResTwo", "AnsOne")), name
        match = pattern(prompt).fullmatch(render(models[name], FORMS[form]))
        if not match or len(set(match.groups())) < len(match.groups()):
            different.append((name, form))
    assert different == []


def ids_in(template, *rounds):
    """Return the ids of the calls in a prompt of Mistral's template, after `rounds` of calls with the given ids."""
    messages: list[Any] = [SYSTEM, USER]
    for ids in rounds:
        messages.append(CALLS | {"tool_calls": [FIRST | {"id": id} for id in ids]})
        messages += [FIRST_RESULT | {"tool_call_id": id, "content": f"Result of {id}"} for id in ids]
    prompt = render(template, [*messages, ANSWER, LAST])
    calls = re.findall(r"\[CALL_ID\](.*?)\[ARGS\]", prompt)
    assert calls == re.findall(r"\[TOOL_RESULTS\](.*?)\[TOOL_CONTENT\]", prompt)
    return calls


def test_tool_call_ids_of_other_formats_become_nine_characters_for_mistral(models):
    template = models["Mistral-Small-3.2-24B-Instruct-2506"]
    first = ids_in(template, ["toolu_1", "call_2"])
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in first)
    later = ids_in(template, ["toolu_1", "call_2"], ["abcdefghi", "toolu_1"], ["abcdefghi"])
    assert later[:2] == first  # the prefix cache needs the same ids in later turns
    assert later[2] == "abcdefghi"
    assert len(set(later)) == 5


def test_tool_call_id_that_equals_a_shortened_one_is_kept_unchanged(models):
    template = models["Mistral-Small-3.2-24B-Instruct-2506"]
    (derived,) = ids_in(template, ["toolu_1"])
    first, second = ids_in(template, ["toolu_1"], [derived])
    assert second == derived
    assert first != derived


def test_tool_results_for_kimi_refer_to_the_ids_that_its_template_writes(models):
    prompt = render(models["moonshotai-Kimi-K2"], FORMS["ids of OpenAI"])
    calls = re.findall(r"<\|tool_call_begin\|>(.*?)<", prompt)
    assert calls == re.findall(r"## Return of (\S+?)\\n", prompt) == ["functions.get_weather:0", "functions.clock:1"]


def test_two_results_with_the_id_of_one_tool_call_are_joined(models):
    twice = conversation(results=[FIRST_RESULT, SECOND_RESULT, FIRST_RESULT | {"content": "More"}])
    joined = conversation(results=[FIRST_RESULT | {"content": "ResOne\nMore"}, SECOND_RESULT])
    for name, template in models.items():
        if name not in WITHOUT_CALLS:
            assert render(template, twice) == render(template, joined), name


INVALID = ['{"city": "Zug', '["Zug"]', '"Zug"', "{'city': 'Zug'}", "Zug", ["Zug"], '{"city": "Zug"}}', '"{Zug"']


def test_invalid_tool_call_arguments_are_rendered_by_every_template(models):
    for name, arguments in pairs(models, INVALID):
        if name not in WITHOUT_CALLS:
            calls = CALLS | {"tool_calls": [with_function(FIRST, arguments=arguments)]}
            prompt = render(models[name], conversation(calls=calls, results=[FIRST_RESULT]))
            assert "Zug" in prompt, (name, arguments)
            assert "ResOne" in prompt, (name, arguments)


def test_empty_tool_call_arguments_are_rendered_as_an_empty_object(models):
    for name, arguments in pairs(models, ["", " ", None, "{}", {}]):
        if name not in WITHOUT_CALLS:
            prompts = {
                render(models[name], conversation(calls=CALLS | {"tool_calls": [one]}, results=[FIRST_RESULT]))
                for one in (with_function(FIRST, arguments=arguments), with_function(FIRST, arguments={}))
            }
            assert len(prompts) == 1, (name, arguments)


ONE_CALL = CALLS | {"tool_calls": [FIRST]}
OTHER_CALL = CALLS | {"tool_calls": [SECOND | {"id": "call00003"}]}
OTHER_RESULT = SECOND_RESULT | {"tool_call_id": "call00003", "content": "ResThree"}
ORDERS = {
    "two system messages": [SYSTEM, {"role": "system", "content": "SysTwo"}, USER, ANSWER, LAST],
    "system message in the middle": [SYSTEM, USER, ANSWER, {"role": "system", "content": "SysTwo"}, LAST],
    "system message in a tool loop": [
        SYSTEM,
        USER,
        ONE_CALL,
        FIRST_RESULT,
        {"role": "system", "content": "SysTwo"},
        ANSWER,
        LAST,
    ],
    "developer": [{"role": "developer", "content": "SysTwo"}, USER, ANSWER, LAST],
    "system and developer": [SYSTEM, {"role": "developer", "content": "SysTwo"}, USER, ANSWER, LAST],
    "two user messages": [SYSTEM, USER, ANSWER, LAST, {"role": "user", "content": "UserThree"}],
    "two answers": [SYSTEM, USER, ANSWER, {"role": "assistant", "content": "AnsTwo"}, LAST],
    "answer before calls": [
        SYSTEM,
        USER,
        ANSWER,
        ONE_CALL,
        FIRST_RESULT,
        {"role": "assistant", "content": "AnsTwo"},
        LAST,
    ],
    "answer first": [SYSTEM, ANSWER, LAST],
    "user after a result": [SYSTEM, USER, ONE_CALL, FIRST_RESULT, LAST],
    "reminders after results": [  # Claude Code
        SYSTEM,
        USER,
        CALLS,
        FIRST_RESULT,
        SECOND_RESULT,
        LAST,
        OTHER_CALL,
        OTHER_RESULT,
        {"role": "user", "content": parts("UserThree")},
    ],
    "interrupted call": [SYSTEM, USER, ONE_CALL, FIRST_RESULT, LAST, {"role": "user", "content": "UserThree"}],
    "instructions, context and prompt": [  # Codex
        SYSTEM,
        {"role": "developer", "content": "SysTwo"},
        USER,
        LAST,
        ANSWER | {"reasoning_content": "I call it."},
        ONE_CALL,
        FIRST_RESULT,
        OTHER_CALL,
        OTHER_RESULT,
        {"role": "user", "content": "UserThree"},
    ],
    "stopped and asked again": [  # Open WebUI
        SYSTEM,
        USER,
        ONE_CALL | {"content": ""},
        FIRST_RESULT,
        ANSWER,
        LAST,
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "UserThree"},
    ],
    "call without a result": [SYSTEM, USER, ONE_CALL, LAST],
    "empty answer": [SYSTEM, USER, {"role": "assistant", "content": ""}, LAST],
    "empty result": [SYSTEM, USER, ONE_CALL, FIRST_RESULT | {"content": ""}, ANSWER, LAST],
    "calls without tools": conversation(),
}
WITH_TOOLS_ONLY = ("-tool_use", "fireworks", "functionary")


def test_messages_in_an_unusual_order_are_rendered_without_loss_by_every_template(models):
    lost = {}
    for name, order in pairs(models, ORDERS):
        messages = ORDERS[order]
        has_calls = any("tool_calls" in message for message in messages)
        if any(part in name for part in WITH_TOOLS_ONLY) or (has_calls and name in WITHOUT_CALLS):
            continue
        if name in ("llama-cpp-rwkv-world", "llama-cpp-deepseek-r1"):
            continue  # these templates of llama.cpp keep only the last system message
        words = re.findall(r"\b(?:Sys|User|Ans|Res)[A-Z]\w*|Zug", json.dumps(messages))
        prompt = render(models[name], messages, None if order == "calls without tools" else TOOLS)
        if missing := [word for word in words if word not in prompt]:
            lost[name, order] = missing
    assert lost == {}


def test_user_text_after_a_tool_result_joins_the_result_for_mistral(models):
    for name in ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512"):
        prompt = render(models[name], [SYSTEM, USER, ONE_CALL, FIRST_RESULT, LAST])
        assert "ResOne\n\nUserTwo" in prompt, name
        assert prompt.endswith("[/TOOL_RESULTS]"), name


def test_user_text_after_a_tool_result_stays_a_message_if_the_template_accepts_it(models):
    prompt = render(models["Qwen-Qwen3-0.6B"], [SYSTEM, USER, ONE_CALL, FIRST_RESULT, LAST])
    assert prompt.endswith("</tool_response><|im_end|>\n<|im_start|>user\nUserTwo<|im_end|>\n<|im_start|>assistant\n")


def test_text_and_reasoning_beside_tool_calls_are_rendered(models):
    beside = ONE_CALL | {"content": "TextBeside", "reasoning_content": "Thought"}
    for name, template in models.items():
        if name not in WITHOUT_CALLS:
            prompt = render(template, [SYSTEM, USER, beside, FIRST_RESULT])
            assert "Zug" in prompt, name
            if name in ("openai-gpt-oss-120b", "mistralai-Ministral-3-14B-Reasoning-2512"):
                assert "Thought" in prompt
                assert "TextBeside" in prompt


def test_message_text_becomes_a_list_of_parts_if_the_template_reads_only_lists():
    part = "{% if part.text %}{{ m.role ~ part.text }}{% endif %}"
    source = f"{{% for m in messages %}}{{% for part in m.content %}}{part}{{% endfor %}}{{% endfor %}}"
    assert render(ChatTemplate(source), [SYSTEM, USER, ANSWER], None) == "systemSysTextuserUserOneassistantAnsOne"


def test_template_that_rejects_every_message_order_reports_its_error_for_the_original_order():
    source = "{{ raise_exception('order ' ~ messages | map(attribute='role') | join(',')) }}"
    with pytest.raises(TemplateError, match=r"order user,user$"):
        render(ChatTemplate(source), [USER, LAST])


@pytest.mark.parametrize(
    ("model", "written"),
    [
        (
            "ibm-granite-granite-3.3-2B-Instruct",
            'assistant<|end_of_role|><|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zug"}}, '
            '{"name": "clock", "arguments": {"zone": "Rome"}}]<|end_of_text|>',
        ),
        (
            "LFM2-8B-A1B",
            'assistant\n<|tool_call_start|>[get_weather(city="Zug"), clock(zone="Rome")]<|tool_call_end|><|im_end|>',
        ),
    ],
)
def test_tool_calls_that_a_template_omits_are_written_in_the_models_format(
    templates: dict[str, str], model: str, written: str
):
    template = ChatTemplate(templates[model], special_tokens=TOKENS)
    assert written in template.render(conversation(), tools=TOOLS)


PHI_4_MINI = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and
message['tools'] is not none %}{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>'
}}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{{
'<|assistant|>' if add_generation_prompt }}"""


def test_tools_are_put_in_the_system_message_if_the_template_reads_them_there():
    template = ChatTemplate(PHI_4_MINI, special_tokens=TOKENS)
    functions = json.dumps([tool["function"] for tool in TOOLS])
    prompt = template.render([USER], tools=TOOLS)
    assert prompt == f"<|system|><|tool|>{functions}<|/tool|><|end|><|user|>UserOne<|end|><|assistant|>"
    prompt = template.render([SYSTEM, USER, CALLS, FIRST_RESULT], tools=TOOLS)
    assert prompt.startswith(f"<|system|>SysText<|tool|>{functions}<|/tool|><|end|>")
    assert '<|assistant|><|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zug"}}, ' in prompt
    assert "tools" not in template.render([SYSTEM, USER])


OLMO_3_THINK = """{% for message in messages %}{% if message['role'] == 'system' %}{{
'<system>' + message['content'] }}{% if message.get('functions') is not none %}{{
'<functions>' + message['functions'] + '</functions>' }}{% endif %}{% elif message['role'] == 'user' %}{{
'<user>' + message['content'] }}{% elif message['role'] == 'assistant' %}{{
'<assistant>' + message['content'] }}{% if message.get('function_calls') is not none %}{{
'<function_calls>' }}{% endif %}{% elif message['role'] == 'environment' %}{{
'<environment>' + message['content'] }}{% endif %}{% endfor %}"""


def test_tool_results_get_the_role_that_the_template_expects():
    template = ChatTemplate(OLMO_3_THINK, special_tokens=TOKENS)
    prompt = template.render([USER, CALLS, FIRST_RESULT, SECOND_RESULT], tools=TOOLS)
    assert prompt.endswith(
        '<user>UserOne<assistant><function_calls>get_weather(city="Zug")\nclock(zone="Rome")</function_calls>'
        "<environment>ResOne<environment>ResTwo"
    )
    assert prompt.startswith('<system><functions>[{"name": "get_weather"')
