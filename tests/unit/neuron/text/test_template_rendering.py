"""Real chat templates render every conversation exactly like `transformers`."""

import re

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from helexa.neuron.text.chat_template import ChatTemplate, TemplateError
from helexa.neuron.text.settings_and_sampling_defaults import TemplateSources
from helexa.neuron.weights.gguf.files import GgufFile
from neuron.text.conversations import CONVERSATIONS, on_the_wire, shapes, text

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
BASE_VARIABLES = [{}, {"enable_thinking": False}]
EXTRA_VARIABLES = [{"enable_thinking": True}, {"add_generation_prompt": False}]
ROLES_ALTERNATE = ": Conversation roles must alternate user/assistant/user/assistant/..."  # Gemma 2, without system
RESULT_ID = re.compile(r"(?<=## Return of )(call0000[12]|functions\.\w+:[01])")  # Kimi's template writes own call ids
SYSTEM_FIRST = (  # templates that reject or omit a system message after other messages
    *("Apertus-8B-Instruct", "Bielik-11B-v3.0-Instruct", "HuggingFaceTB-SmolLM3-3B", "MiniMax-M1", "MiniMax-M2"),
    *("MiniMax-M3", "Mistral-Small-3.2-24B-Instruct-2506", "NVIDIA-Nemotron-Nano-v2", "Qwen3.5-4B", "Reka-Edge"),
    *("google-gemma-2-2b-it", "mistralai-Ministral-3-14B-Reasoning-2512", "mistralai-Mistral-Nemo-Instruct-2407"),
    "openai-gpt-oss-120b",
)
SINGLE_CALLS = (  # templates that reject or omit a second call in a message
    *("GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b"),
    *("meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
)
WITHOUT_SYSTEM = ("google-gemma-2-2b-it", "ggml-vocab-phi-3.gguf")  # Gemma 2 rejects system messages, Phi 3 omits them
WITH_CALLS = ("a result", "several steps", "parts of a tool")
WITHOUT_CALLS = ("LFM2-8B-A1B", "ibm-granite-granite-3.3-2B-Instruct")  # templates that omit calls; we write them
REPAIRED = {
    *((name, conversation) for name in WITHOUT_CALLS for conversation in CONVERSATIONS if "call" in conversation),
    *(
        (name, conversation)
        for name in WITHOUT_CALLS
        for conversation in ("a result", "several steps", "parts of a tool")
    ),
    *((name, "unusual order") for name in SYSTEM_FIRST),
    *((name, "parallel calls") for name in SINGLE_CALLS),
    ("ggml-vocab-command-r.gguf", "unusual order"),
    ("ggml-vocab-phi-3.gguf", "unusual order"),
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "a call with text"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "empty texts"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "empty assistant message"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "other names of thinking"),
    *(("mistralai-Ministral-3-14B-Reasoning-2512", name) for name in CONVERSATIONS if "thinking" in name),
}
EXTRA_CONVERSATIONS = ("several turns", "several steps", "thinking")


@pytest.fixture(autouse=True)
def mutable_lists(monkeypatch):
    """Let templates change lists in `transformers`, too, as llama.cpp's templates of Kimi K2 do."""
    monkeypatch.setattr(ImmutableSandboxedEnvironment, "is_safe_attribute", SandboxedEnvironment.is_safe_attribute)


def reference(source, messages, tools, **variables):
    """Return the text that `transformers` renders, or the error that it raises."""
    arguments = {"add_generation_prompt": True, **TOKENS, **variables}
    try:
        (text,), _ = render_jinja_template([messages], tools=tools, chat_template=source, **arguments)
    except Exception as error:
        return error
    return text


def as_system(messages):
    """Return the conversation with the role `system` instead of `developer`, which few templates know."""
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def without_system(messages):
    """Return the conversation with the system text at the beginning of the first user message."""
    system, *others = as_system(messages)
    if system["role"] != "system":
        return messages
    (index, user) = next((index, turn) for index, turn in enumerate(others) if turn["role"] == "user")
    if isinstance(user["content"], list):
        content = [*text(*([system["content"]] if system["content"] else [])), *user["content"]]
    else:
        prompt = system["content"]
        prompt = "\n".join(part["text"] for part in prompt) if isinstance(prompt, list) else prompt
        content = "\n\n".join(filter(None, [prompt, user["content"]]))
    return [*others[:index], user | {"content": content}, *others[index + 1 :]]


def rendered(template, messages, tools, **variables):
    try:
        return template.render(messages, tools=tools, **variables)
    except TemplateError as error:
        return error


def renders_everything(result, name):
    """Return whether `result` contains the tool calls and the content parts of conversation `name`, not as JSON."""
    if isinstance(result, Exception):
        return False
    messages, _ = CONVERSATIONS[name]
    has_calls = any("tool_calls" in message for message in messages)
    has_parts = any(isinstance(message["content"], list) for message in messages)
    if name == "a developer" and "Be brief." not in result:
        return False
    return ("Chur" in result or not has_calls) and (
        not has_parts
        or ("one" in result and "two" in result and "'type': 'text'" not in result and '"type": "text"' not in result)
    )


def expected(source, name, variables, template=""):
    """Return the expected text, or the expected error.

    The reference is the first format of the conversation with which `transformers` renders all calls and parts. If no
    format does, for example because the template ignores tool calls, the last format counts, which has no null values.
    """
    messages, tools = CONVERSATIONS[name]
    if template in WITHOUT_SYSTEM:
        messages = without_system(messages)
    forms = [messages, as_system(messages)] if "developer" in source else [as_system(messages)]
    for shape in [shape for form in forms for shape in shapes(form)]:
        result = reference(source, shape, tools, **variables)
        if renders_everything(result, name):
            break
    return result


def differences(name, source):
    """Yield every conversation that our renderer renders differently from `transformers`."""
    template = ChatTemplate(source, special_tokens=TOKENS)
    for conversation, (messages, tools) in CONVERSATIONS.items():
        for variables in BASE_VARIABLES + (EXTRA_VARIABLES if conversation in EXTRA_CONVERSATIONS else []):
            ours = rendered(template, on_the_wire(messages), tools, **variables)
            theirs = expected(source, conversation, variables, name)
            if not agree(theirs, ours):  # retry: templates may write the time, and a minute may have ended
                ours = rendered(template, on_the_wire(messages), tools, **variables)
            if not agree(theirs, ours) and not repaired(name, conversation, ours):
                yield name, conversation, variables, theirs, ours


def repaired(name, conversation, ours):
    """Return whether our renderer repairs a conversation that the template rejects or cuts, without loss of text."""
    if (name, conversation) not in REPAIRED:
        return False
    texts = [message["content"] for message in CONVERSATIONS[conversation][0] if isinstance(message["content"], str)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return renders_everything(ours, conversation) and all(word in ours for word in words)


def agree(theirs, ours):
    if isinstance(ours, str) and isinstance(theirs, str):
        ours, theirs = (RESULT_ID.sub("", text) for text in (ours, theirs))
    if isinstance(theirs, str) or not isinstance(ours, TemplateError):
        return ours == theirs
    message = " ".join(str(theirs).split())[:500]
    return str(ours).endswith((f": {message}", ROLES_ALTERNATE))


def test_every_real_chat_template_renders_the_same_prompt_as_transformers(templates):
    mismatches = [difference for name, source in templates.items() for difference in differences(name, source)]
    assert mismatches == []


def test_missing_tool_parameter_description_becomes_empty_if_the_template_needs_one(templates):
    """The template of Command R raises an error for them, and tools of MCP servers often have none."""
    properties = {"days": {"type": "integer"}, "box": {"type": "object"}}
    function = {"name": "plan", "parameters": {"type": "object", "properties": properties}}
    template = ChatTemplate(templates["CohereForAI-c4ai-command-r-plus-tool_use"], special_tokens=TOKENS)
    prompt = template.render([{"role": "user", "content": "Hi"}], tools=[{"type": "function", "function": function}])
    assert "days (Optional[int]): \n" in prompt and "box (" in prompt


def test_templates_of_gguf_files_render_like_transformers(llama_cpp_models, smollm2_gguf):
    paths = [smollm2_gguf, *llama_cpp_models.glob("ggml-vocab-*.gguf")]
    sources = {path.name: TemplateSources.in_gguf(GgufFile.open(path).metadata).default for path in paths}
    mismatches = [difference for name, source in sources.items() if source for difference in differences(name, source)]
    assert mismatches == []


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2, sort_keys=true) }}",
        "{{ {'a': [1, 2.5, none, true]} | tojson(separators=(',', ':')) }}{{ '☃' | tojson(ensure_ascii=true) }}",
        "{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ tool is defined }}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}{{ unk_token }}{{ unk_token + 'x' }}",
        "{% for m in messages %}\n  {% if loop.first %}\n {% continue %}\n  {% endif %}\n {{ m }}\n{% endfor %}\n",
        "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[1].role }}{{ x }}{% endgeneration %}{{ x }}",
        "{% macro m(a) %}{{ a }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(2) %}3{% endcall %}",
        "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}{{ n.b }}",
        "{{ namespace(_a=1) }}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ namespace({'a': 1}, self=2).self }}{{ namespace({'a': 1}).a }}",
        "{{ dict(a=1, b=2) }}{{ dict.fromkeys('ab', 1) }}",
        "{{ dict.update }}",
        "{{ messages.append(1) }}{{ messages | length }}{% set n = namespace(a=[1]) %}{% set _ = n.a.pop() %}{{ n.a }}",
        "{{ messages[0].update({}) }}",
        "{{ ''.__class__ }}",
        "{{ '' | attr('__class__') }}{{ messages | map(attribute='__class__') | list }}",
        "{{ '' | attr('__class__') | attr('__mro__') }}",
        "{{ 9**9**9 }}",
        "{{ raise_exception('roles must\nalternate') }}",
        "{{ strftime_now('%Y %d %b') }}",
        "{{ messages[0]['nothing'].at_all }}",
        "{{ 'a' + 1 }}",
        "{{ 2 ** 70 }}{{ 7 // 2 }}{{ 'ab' * 3 }}{{ [1] + [2] }}{{ '%05d|%s' % (7, 'x') }}{{ 'a' ~ 1 ~ none }}",
        "{{ '{:>5}|{x}'.format('a', x=1) }}{{ '{0.__class__}'.format('a') }}",
        "{{ range(100001) | length }}",
        "{{ ' a,b '.strip().split(',')[-1].upper().startswith('B') }}{{ 'ab'[::-1] }}{{ 'a\nb'.splitlines() }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('-') }}",
        "{{ messages[0].items() | list }}{% for k, v in messages[0] | dictsort %}{{ k }}={{ v }};{% endfor %}",
        "{{ {'b': 1} | items | list }}{{ 'x' is string }}{{ [] is iterable }}{{ {} is mapping }}{{ 1 is sequence }}",
        "{{ 'x' | indent(2, true) }}{{ '<' | e }}{{ '<' | safe }}{{ 1.0 }}{{ 1e22 }}{{ none }}{{ true }}",
        "{{ x is undefined }}{{ x | default('d') }}{{ x.y }}",
        "{% set x %}a{{ 1 }}{% endset %}{{ x | trim }}{% filter upper %}b{% endfilter %}",
        "{%- if true -%}  a  {%- endif %}\n\n b {#- c -#} \n",
    ],
)
def test_jinja_features_render_like_transformers(source):
    messages = [{"role": "assistant", "content": "é<&>'"}, {"role": "user", "content": "\u2028"}]
    ours = rendered(ChatTemplate(source, special_tokens=TOKENS), messages, None)
    assert agree(reference(source, messages, None), ours), ours
