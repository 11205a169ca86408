"""Real chat templates render every conversation exactly like `transformers`."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from helexa.neuron.text.templates.chat_template import ChatTemplate
from helexa.neuron.text.templates.template_renderer import TemplateError
from helexa.neuron.text.templates.template_sources import TemplateSources
from helexa.neuron.weights.gguf.files import GgufFile
from neuron.text.conversations import CONVERSATIONS, on_the_wire, shapes

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
BASE_VARIABLES = [{}, {"enable_thinking": False}]
EXTRA_VARIABLES = [{"enable_thinking": True}, {"add_generation_prompt": False}]
EXTRA_CONVERSATIONS = ("several turns", "several steps", "thinking")


def reference(source, messages, tools, **variables):
    """Return the text that `transformers` renders, or the error that it raises."""
    arguments = {"add_generation_prompt": True, **TOKENS, **variables}
    try:
        (text,), _ = render_jinja_template([messages], tools=tools, chat_template=source, **arguments)
    except Exception as error:
        return error
    return text


def rendered(template, messages, tools, **variables):
    try:
        return template.render(messages, tools=tools, **variables)
    except TemplateError as error:
        return error


def renders_everything(text, name):
    """Return whether `text` contains the tool calls and the content parts of conversation `name`, not as JSON."""
    if isinstance(text, Exception):
        return False
    messages, _ = CONVERSATIONS[name]
    has_calls = any("tool_calls" in message for message in messages)
    has_parts = any(isinstance(message["content"], list) for message in messages)
    return ("Chur" in text or not has_calls) and (
        not has_parts
        or ("one" in text and "two" in text and "'type': 'text'" not in text and '"type": "text"' not in text)
    )


def expected(source, name, variables):
    """Return the expected text, or the expected error.

    The reference is the first format of the conversation with which `transformers` renders all calls and parts. If no
    format does, for example because the template ignores tool calls, the last format counts, which has no null values.
    """
    messages, tools = CONVERSATIONS[name]
    for shape in shapes(messages):
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
            theirs = expected(source, conversation, variables)
            if not agree(theirs, ours):  # retry: templates may write the time, and a minute may have ended
                ours = rendered(template, on_the_wire(messages), tools, **variables)
            if not agree(theirs, ours):
                yield name, conversation, variables, theirs, ours


def agree(theirs, ours):
    if isinstance(theirs, str):
        return ours == theirs
    message = " ".join(str(theirs).split())[:500]
    return isinstance(ours, TemplateError) and str(ours).endswith(f": {message}")


def test_every_real_template_renders_like_transformers(templates):
    mismatches = [difference for name, source in templates.items() for difference in differences(name, source)]
    assert mismatches == []


def test_gguf_templates_render_like_transformers(llama_cpp_models, smollm2_gguf):
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
        "{{ messages.append(1) }}",
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
def test_jinja_features_equal_transformers(source):
    messages = [{"role": "system", "content": "é<&>'"}, {"role": "user", "content": "\u2028"}]
    ours = rendered(ChatTemplate(source, special_tokens=TOKENS), messages, None)
    assert agree(reference(source, messages, None), ours), ours
