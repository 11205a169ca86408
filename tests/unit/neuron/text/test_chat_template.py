"""Chat templates: formats of messages, rejected input, and continued messages."""

import copy
import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from helexa.neuron.text.chat_template import CHATML, ChatTemplate, TemplateError
from helexa.neuron.text.settings_and_sampling_defaults import MAX_SOURCE_LENGTH
from helexa.neuron.weights.gguf.files import GgufFile
from neuron.text.conversations import HI, RESULT, TOOLS, WEATHER_CALL, WEATHER_MESSAGE, calling, text

TEXT_ONLY = ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.2-3B-Instruct", "google-gemma-2-2b-it"]
CALLS = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function | tojson }};{% endfor %}{% endfor %}"


def history(arguments):
    return [
        WEATHER_MESSAGE,
        calling(WEATHER_CALL | {"function": {"name": "get_weather", "arguments": arguments}}),
        RESULT,
    ]


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "GLM-4.6", "openai-gpt-oss-120b"])
def test_tool_call_arguments_render_equally_whether_sent_as_object_or_text(templates, name):
    template = ChatTemplate(templates[name])
    arguments = {"city": "Chur", "days": 2, "nested": {"a": [1, None]}}
    shapes = (arguments, json.dumps(arguments), json.dumps(arguments, indent=1))
    (rendered,) = {template.render(history(shape), tools=TOOLS) for shape in shapes}
    assert "Chur" in rendered
    assert "7 degrees" in rendered


def test_message_without_content_renders_like_null_content(templates):
    for name in ("Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "unsloth-mistral-Devstral-Small-2507"):
        template = ChatTemplate(templates[name])
        messages = history({"city": "Bern"})
        rendered = template.render(messages, tools=TOOLS)
        assert "Bern" in rendered
        del messages[1]["content"]
        assert template.render(messages, tools=TOOLS) == rendered


def test_tool_call_arguments_stay_text_if_the_template_concatenates_them(templates):
    template = ChatTemplate(templates["deepseek-ai-DeepSeek-R1-Distill-Llama-8B"])
    assert '{"city": "Zürich"}' in template.render(history({"city": "Zürich"}))
    assert '{"city":"Zürich"}' in template.render(history('{"city":"Zürich"}'))


def test_tool_call_arguments_that_are_no_object_are_rendered_as_empty_object_or_string():
    forms = ("", " ", "{not json", "[1]", "{}", None, [1], 7, json.dumps('{"a": 1}'), '""')
    rendered = [ChatTemplate(CALLS).render(history(form)) for form in forms]
    arguments = ["{}", "{}", '"{not json"', '"[1]"', "{}", "{}", '"[1]"', '"7"', '{"a": 1}', '"\\"\\""']
    assert rendered == [f'{{"name": "get_weather", "arguments": {text}}};' for text in arguments]


def test_malformed_tool_calls_are_passed_to_the_template_unchanged():
    template = ChatTemplate("{{ messages[0].tool_calls | tojson if messages[0].tool_calls is defined }}")
    for calls in ([1], [{"function": 2}], [{}], "x"):
        assert json.loads(template.render([{"role": "assistant", "tool_calls": calls}])) == calls
    assert template.render([{"role": "assistant", "tool_calls": None}]) == ""


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_content_parts_are_joined_for_templates_that_read_only_text(templates, name):
    template = ChatTemplate(templates[name])
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    joined = template.render([{"role": "user", "content": "one\ntwo\nthree"}])
    assert template.render([{"role": "user", "content": parts}]) == joined
    with pytest.raises(TemplateError, match="image_url"):
        template.render([{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {}}]}])


def test_content_parts_are_kept_if_the_template_supports_them(templates):
    template = ChatTemplate(templates["Qwen3.5-4B"])
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": " there"}]
    rendered = template.render([{"role": "user", "content": parts}])
    assert "Look: <|vision_start|><|image_pad|><|vision_end|> there" in rendered


def test_smollm2_template_joins_content_parts_and_accepts_null(smollm2_gguf):
    template = ChatTemplate(GgufFile.open(smollm2_gguf).metadata["tokenizer.chat_template"])
    rendered = template.render([{"role": "user", "content": text("one", "two")}, HI | {"content": None}])
    assert "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n" in rendered


def test_rendering_a_template_does_not_modify_the_messages(templates):
    messages = [*history('{"city": "Bern"}'), HI | {"reasoning": "so", "content": text("a")}]
    original = copy.deepcopy(messages)
    ChatTemplate(templates["Qwen-Qwen3-0.6B"]).render(messages, tools=TOOLS)
    assert messages == original


def test_chat_template_kwargs_are_passed_to_the_template(templates):
    template = ChatTemplate(templates["Qwen-Qwen3-0.6B"])
    messages = [{"role": "user", "content": "?"}]
    assert template.render(messages).endswith("<|im_start|>assistant\n")
    assert template.render(messages, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert template.mentions("enable_thinking")
    assert template.mentions("tools")
    assert not template.mentions("documents")


def test_chat_template_kwargs_cannot_replace_the_messages():
    template = ChatTemplate("{{ messages[0].role }}{{ bos_token }}", special_tokens={"bos_token": "<s>"})
    assert template.render([WEATHER_MESSAGE], messages=[HI], bos_token="<b>") == "user<b>"


def test_template_named_tool_use_is_used_if_tools_are_given(templates):
    template = ChatTemplate("{{ bos_token }}", tool_use="{{ tools | length }}{{ eos }}", special_tokens={"eos": "e"})
    assert template.render([WEATHER_MESSAGE]) == template.render([WEATHER_MESSAGE], tools=[]) == ""
    assert template.render([WEATHER_MESSAGE], tools=TOOLS) == "2e"
    assert template.mentions("tools")
    assert not ChatTemplate("x", tool_use="y").mentions("tools")


def test_model_without_a_template_is_rendered_as_chatml():
    rendered = ChatTemplate(CHATML).render([{"role": "user", "content": text("Hi")}])
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "failed: roles must alternate$"),
        ("line\n{% for %}", "broken in line 2"),
        ("{% unknown %}", "unknown tag 'unknown'"),
        ("{{ 1 | no_such_filter }}", "no_such_filter"),
        ("x" * (MAX_SOURCE_LENGTH + 1), "set a shorter chat_template"),
        ("{{" + "(" * 100_000, "the chat template"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_template_error_contains_the_message_raised_by_the_template(source, problem):
    template = ChatTemplate(source)
    with pytest.raises(TemplateError, match=problem) as failed:
        template.render([{"role": "user", "content": "x"}])
    assert "\n" not in str(failed.value)
    assert len(str(failed.value)) < 600
    assert not template.mentions("anything")


def test_lone_surrogates_are_rendered_unchanged():
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "a\ud800é☃🌤"}]) == "a\ud800é☃🌤"


CONTINUED = [
    [WEATHER_MESSAGE, HI],
    [WEATHER_MESSAGE, HI | {"content": "Hi,  "}],
    [WEATHER_MESSAGE, HI | {"content": text("Hi", "there ")}],
    [HI, WEATHER_MESSAGE],
]


@pytest.mark.parametrize("messages", CONTINUED, ids=range(len(CONTINUED)))
def test_continue_final_message_renders_the_same_prompt_as_transformers(templates, messages):
    for name in ("Qwen3.5-4B", "Qwen3-Coder", "LFM2.5-8B-A1B", "google-gemma-4-31B-it", "Qwen-Qwen2.5-7B-Instruct"):
        source = templates[name]
        if isinstance(messages[-1]["content"], list) and name in ("Qwen3-Coder", "Qwen-Qwen2.5-7B-Instruct"):
            continue  # these templates accept only text
        (expected,), _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
        assert ChatTemplate(source).render(messages, continue_final_message=True) == expected


def test_continue_final_message_without_text_in_the_message_is_an_error():
    with pytest.raises(TemplateError, match="does not render the final message"):
        ChatTemplate("x").render([HI], continue_final_message=True)
    seeing = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    for source, messages in (
        (seeing, [{"role": "user", "content": [{"type": "image"}]}]),
        (seeing, [{"role": "user", "content": []}]),
        (CALLS, [calling(WEATHER_CALL)]),
        (CHATML, []),
    ):
        with pytest.raises(TemplateError, match="no text to continue"):
            ChatTemplate(source).render(messages, continue_final_message=True)
