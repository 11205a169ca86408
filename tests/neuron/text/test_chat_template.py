"""Chat templates: real ones against transformers, hostile ones against the bounds."""

import copy
import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from helexa.core.errors import ModelFileError
from helexa.neuron.text import template_environment
from helexa.neuron.text.chat_template import CHATML, MAX_SOURCE_LENGTH, ChatTemplate, TemplateError, template_source
from helexa.neuron.weights.gguf import GgufFile

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather at a place, in °C & <b>more</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <b>& café</b>"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Weather in Zürich?"},
]
TEXT_ONLY = ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.2-3B-Instruct", "google-gemma-2-2b-it"]
WITH_TOOLS = [
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "Qwen3.5-4B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "GLM-4.6",
    "MiniMax-M2",
    "openai-gpt-oss-120b",
]


def history(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "7 degrees"},
    ]


def reference(source, messages, tools):
    """The text that transformers renders, or None."""
    try:
        (text,), _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )
    except Exception:
        return None
    return text


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_every_real_template_renders_as_in_transformers(templates, tools):
    rendered = 0
    for name, source in templates.items():
        expected = reference(source, PLAIN, tools)
        if expected is not None:
            assert ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(PLAIN, tools=tools) == expected, name
            rendered += 1
    assert rendered > 60


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_tool_history_renders_whatever_the_shape_of_its_arguments(templates, name):
    template = ChatTemplate(templates[name])
    arguments = {"city": "Zürich", "days": 2, "nested": {"a": [1, None]}}
    texts = {
        template.render(history(shape), tools=TOOLS)
        for shape in (arguments, json.dumps(arguments), json.dumps(arguments, indent=1))
    }
    (text,) = texts
    assert "get_weather" in text
    assert "Zürich" in text
    assert "7 degrees" in text
    # Once in the list of tools at the least, and once in the call.
    assert text.count("get_weather") > template.render(PLAIN[:2], tools=TOOLS).count("get_weather")


@pytest.mark.parametrize("name", [*WITH_TOOLS, "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"])
def test_null_and_absent_content_are_legal(templates, name):
    template = ChatTemplate(templates[name])
    messages = history({"city": "Bern"})
    text = template.render(messages, tools=TOOLS)
    assert "get_weather" in text
    assert "Bern" in text
    assert "None" not in text.replace(template.render(messages[:1], tools=TOOLS), "")
    del messages[1]["content"]
    assert template.render(messages, tools=TOOLS) == text


def test_arguments_stay_text_for_a_template_that_appends_them(templates):
    template = ChatTemplate(templates["deepseek-ai-DeepSeek-R1-Distill-Llama-8B"])
    assert '{"city": "Zürich"}' in template.render(history({"city": "Zürich"}))
    assert '{"city":"Zürich"}' in template.render(history('{"city":"Zürich"}'))


def test_arguments_that_are_no_object(templates):
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function | tojson }};{% endfor %}{% endfor %}"
    )
    rendered = [template.render(history(shape)) for shape in ("", " ", "{not json", "[1]", "{}", None)]
    arguments = ["{}", "{}", '"{not json"', '"[1]"', "{}", "null"]
    assert rendered == [f'{{"name": "get_weather", "arguments": {text}}};' for text in arguments]


def test_malformed_tool_calls_are_left_to_the_template():
    template = ChatTemplate("{{ messages[0].tool_calls | tojson }}")
    for calls in ([1], [{"function": 2}], [{}], "x", None):
        assert json.loads(template.render([{"role": "assistant", "tool_calls": calls}])) == calls


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_parts_are_joined_where_a_template_takes_text_only(templates, name):
    template = ChatTemplate(templates[name])
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    joined = template.render([{"role": "user", "content": "one\ntwo\nthree"}])
    assert template.render([{"role": "user", "content": parts}]) == joined
    with pytest.raises(TemplateError, match="image_url"):
        template.render([{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {}}]}])


def test_parts_stay_parts_where_a_template_understands_them(templates):
    template = ChatTemplate(templates["Qwen3.5-4B"])
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": " there"}]
    text = template.render([{"role": "user", "content": parts}])
    assert "Look: <|vision_start|><|image_pad|><|vision_end|> there" in text


def test_smollm2_joins_parts_and_takes_null(smollm2_gguf):
    template = ChatTemplate(GgufFile.open(smollm2_gguf).metadata["tokenizer.chat_template"])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = template.render([{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    assert "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n" in text


def test_messages_are_not_changed(templates):
    messages = history('{"city": "Bern"}')
    before = copy.deepcopy(messages)
    ChatTemplate(templates["Qwen-Qwen3-0.6B"]).render(messages, tools=TOOLS)
    assert messages == before


def test_variables_reach_the_template(templates):
    template = ChatTemplate(templates["Qwen-Qwen3-0.6B"])
    question = [{"role": "user", "content": "?"}]
    assert template.render(question).endswith("<|im_start|>assistant\n")
    assert template.render(question, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert template.render(question, add_generation_prompt=False).endswith("<|im_end|>\n")
    assert template.mentions("enable_thinking")
    assert template.mentions("tools")
    assert not template.mentions("documents")


def test_the_dialect():
    render = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}|{{ eos_token }}|{{ strftime_now('%%') }}",
        bos_token="<s>",
    ).render
    assert render([{"role": "é<&>'"}, {"role": "x"}]) == '<s>{"role": "é<&>\'", "content": null}||%'
    indented = ChatTemplate("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}").render([])
    assert indented == json.dumps({"b": 1, "a": [2]}, indent=1, sort_keys=True)
    assert ChatTemplate("{{ 'a b'.split() | join('-') }}{{ tools is none }}").render([], tools=[]) == "a-bTrue"


def test_the_fallback():
    text = ChatTemplate(CHATML).render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "failed: roles must alternate$"),
        ("{{ messages[0].nothing.at_all }}", "no attribute 'nothing'|has no attribute"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("line\n{% for %}", "broken in line 2"),
        ("{% unknown %}", "unknown tag 'unknown'"),
        ("{{ 1 | no_such_filter }}", "no_such_filter"),
        ("x" * (MAX_SOURCE_LENGTH + 1), "longer than"),
        ("{{" + "(" * 100_000, "broken"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{% for x in range(10**9) %}{% endfor %}", "power"),
        ("{% for x in range(999999999) %}{% endfor %}", "Range too big"),
    ],
)
def test_failures_say_what_the_template_says(source, says):
    template = ChatTemplate(source)
    with pytest.raises(TemplateError, match=says) as failed:
        template.render([{"role": "user", "content": "x"}])
    assert "\n" not in str(failed.value)
    assert len(str(failed.value)) < 600


LOOP = "{% for x in range(99999) %}"
ENDLESS = {
    "loops": LOOP * 4 + "{% endfor %}" * 4,
    "conditions": LOOP + "{% for y in range(99999) if y < 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "recursive loops": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 100 }}{% endfor %}",
}
HUGE = {
    "output": LOOP + "{{ 'x' * 999 }}{% endfor %}",
    "product": "{{ 'x' * 9999999999 }}",
    "product of a list": "{{ ([1, 2] * 9999999999) | length }}",
    "sums": "{% set n = namespace(s='xx') %}" + LOOP + "{% set n.s = n.s + n.s %}{% endfor %}",
    "sums of lists": "{% set n = namespace(s=[1]) %}" + LOOP + "{% set n.s = n.s + n.s %}{% endfor %}",
    "joins": "{% set n = namespace(s='xx') %}" + LOOP + "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "numbers": "{% set n = namespace(s=3) %}" + LOOP + "{% set n.s = n.s * n.s %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_templates_are_stopped(source, monkeypatch):
    monkeypatch.setattr(template_environment, "MAX_SECONDS", 0.1)
    with pytest.raises(TemplateError, match="runs for too long"):
        ChatTemplate(source).render([])


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_huge_results_are_refused(source):
    with pytest.raises(TemplateError, match=r"writes more than|too large|builds more than"):
        ChatTemplate(source).render([])


def test_a_long_conversation_is_within_the_bounds(templates):
    messages = PLAIN[:1] + [
        {"role": role, "content": "word " * 100} for _ in range(500) for role in ("user", "assistant")
    ]
    for name in ("Qwen-Qwen3-0.6B", "Qwen3.5-4B", "meta-llama-Llama-3.1-8B-Instruct"):
        assert ChatTemplate(templates[name]).render(messages).count("word") == 100_000


def test_which_file_of_a_directory_counts(tmp_path: Path):
    assert template_source(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert template_source(tmp_path) == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}, "x"]
    config.write_text(json.dumps({"chat_template": named}))
    assert template_source(tmp_path) == "default"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    assert template_source(tmp_path) == "tools"
    for nothing in ([], [1], {}, 7, None, " "):
        config.write_text(json.dumps({"chat_template": nothing}))
        assert template_source(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert template_source(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text(" \n")
    assert template_source(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert template_source(tmp_path) == "jinja"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"chat_template\.json"):
        template_source(tmp_path)
