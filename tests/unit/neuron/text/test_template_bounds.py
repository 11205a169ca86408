"""Bounds on time and memory of hostile chat templates."""

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from helexa.neuron.text import chat_template
from helexa.neuron.text.chat_template import CHATML, PROCESSES, ChatTemplate, TemplateBoundsError, TemplateRenderer

LOOP = "{% for x in range(99999) %}"
END = "{% endfor %}"
GROW = "{% set n = namespace(s='xx', l=[1], d=3) %}"
DEEP = "{% set n = namespace(l=[1], m=[1]) %}{% for x in range(99) %}"
DEEP += "{% set n.l = [n.l, n.l] %}{% set n.m = [n.m, n.m] %}" + END

ENDLESS = {
    "loops": LOOP * 4 + END * 4,
    "conditions": LOOP + "{% for y in range(99999) if y < 0 %}{% endfor %}" + END,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "recursive loops": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 100 }}{% endfor %}",
    "comparing": DEEP + "{{ n.l == n.m }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "a power in rounding": "{{ 1.5 | round(999999999, 'floor') }}",
}
LARGE = {
    "product": "{{ 'x' * 9999999999 }}",
    "product of a list": "{{ ([1, 2] * 9999999999) | length }}",
    "output": LOOP + "{{ 'x' * 9999 }}" + END,
    "sums": GROW + LOOP + "{% set n.s = n.s + n.s %}" + END,
    "joins": GROW + LOOP + "{% set n.s = n.s ~ n.s %}" + END,
    "numbers": GROW + LOOP + "{% set n.d = n.d * n.d %}" + END,
    "a chain of lists": GROW + LOOP * 2 + "{% set n.l = [n.l, 'y' ~ x, [x]] %}" + END * 2,
    "many texts": GROW + LOOP + "{% set n.l = n.l + ['x' * 999999 ~ x] %}" + END,
    "JSON of a structure": DEEP + "{{ n.l | tojson }}",
    "indented JSON": "{{ [[1]] | tojson(indent=900000000) }}",
    "a block": "{% set s = 'x' * 9999999 %}{% set t %}" + LOOP + "{{ s }}" + END + "{% endset %}{{ t | length }}",
    "center": "{{ 'x'.center(900000000) | length }}",
    "replace": "{{ ('x' * 99999).replace('x', 'y' * 99999) | length }}",
    "join": "{{ ('y' * 99999).join(('x ' * 99999).split()) | length }}",
    "a list of characters": "{{ ('ඒ' * 9999999 ~ 'ab') | list | map('upper') | list | length }}",
    "a width": "{{ '%900000000d' % 1 }}",
    "the filter indent": "{{ ('\n' * 99999) | indent('y' * 99999, true, true) | length }}",
    "the filter batch": "{{ [1] | batch(900000000, 'x') | list | length }}",
    "the filter slice": "{{ [1] | slice(900000000) | list | length }}",
    "the filter sum": "{{ ([[1] * 99999] * 99999) | sum(start=[]) | length }}",
    "the filter urlize": "{{ ('www.a.de ' * 9999) | urlize(target='y' * 99999) | length }}",
    "the filter xmlattr": "{{ {'a': ['y' * 9999999] * 99} | xmlattr | length }}",
    "lipsum": "{{ lipsum(n=99999999) | length }}",
    "a constant of the source": "{{ " + "[" * 40 + "'x'" + "]" * 40 + " | string | center(900000000) }}",
}

# Runs all templates in a new process, so that every child process belongs to the renderer.
_SCRIPT = """
import json, resource, sys
from helexa.neuron.text import chat_template
chat_template.MAX_SECONDS = 0.3
def peak(whose):
    return resource.getrusage(whose).ru_maxrss >> 10
renderer = chat_template.TemplateRenderer()
renderer.render("x", {})
peak_before = peak(resource.RUSAGE_SELF)
texts = {}
for name, source in json.load(sys.stdin).items():
    try:
        texts[name] = renderer.render(source, {})[:99]
    except chat_template.TemplateError as error:
        texts[name] = str(error)
chat_template.PROCESSES.close()
growth = peak(resource.RUSAGE_SELF) - peak_before
json.dump([texts, peak(resource.RUSAGE_CHILDREN), growth], sys.stdout)
"""


@pytest.fixture(scope="module")
def outcomes():
    """Return each template's output or error, the renderer's peak memory in MiB, and the server's growth in MiB."""
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT], input=json.dumps(ENDLESS | LARGE), capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_chat_templates_are_stopped_with_an_error(outcomes, name):
    assert outcomes[0][name].startswith("the chat template failed: the sandbox process runs for too long; ")


@pytest.mark.parametrize("name", LARGE)
def test_chat_templates_that_compute_large_values_are_stopped_with_an_error(outcomes, name):
    assert outcomes[0][name].startswith("the chat template failed: ")


def test_chain_of_powers_in_a_template_is_evaluated_from_the_left():
    """Jinja evaluates `9**9**9` as `(9**9)**9`, which has 78 digits, so the bounds allow it."""
    assert TemplateRenderer().render("{{ 9**9**9 }}", {}) == str(9**81)


@pytest.mark.parametrize("read", ["(x | attr('__class__'))", "x.__class__", "x['__class__']"])
def test_internal_python_attribute_in_a_template_renders_empty_and_fails_if_used(read):
    renderer = TemplateRenderer()
    assert renderer.render(f"[{{{{ {read} }}}}]", {"x": "text"}) == "[]"
    for use in (".__mro__", "()", " + 'a'", "[0]"):
        with pytest.raises(chat_template.TemplateError, match=r"access to attribute '__class__' .* is unsafe"):
            renderer.render(f"{{{{ {read}{use} }}}}", {"x": "text"})


def test_hostile_templates_increase_memory_only_a_little(outcomes):
    _, largest_renderer, server_growth = outcomes
    assert largest_renderer < 180
    assert server_growth < 16


def test_template_output_above_the_size_limit_raises_an_error():
    with pytest.raises(chat_template.TemplateError, match="the prompt has more than"):
        ChatTemplate(LOOP + "{{ 'x' * 999 }}" + END).render([])


def test_conversation_too_large_for_the_template_renderer_is_rejected():
    with pytest.raises(TemplateBoundsError, match="more than 64 MiB"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "x" * (65 << 20)}])
    with pytest.raises(TemplateBoundsError, match="too much memory"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "x" * (60 << 20)}])
    assert ChatTemplate(CHATML).render([{"role": "user", "content": "x"}])


def test_long_conversation_is_within_the_bounds_of_the_template_renderer(templates):
    turns = [{"role": role, "content": "word " * 100} for _ in range(500) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "Be brief."}, *turns]
    for name in ("Qwen-Qwen3-0.6B", "Qwen3.5-4B", "meta-llama-Llama-3.1-8B-Instruct"):
        assert ChatTemplate(templates[name]).render(messages).count("word") == 100_000
    assert ChatTemplate(CHATML).render([{"role": "user", "content": "字" * (5 << 20)}]).count("字") == 5 << 20


def test_endless_template_is_stopped_during_the_trial_rendering(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.1)
    template = ChatTemplate(ENDLESS["loops"])
    with pytest.raises(TemplateBoundsError, match="runs for too long"):
        template.render([{"role": "user", "content": [{"type": "text", "text": "x"}]}])


def test_template_renderer_restarts_its_killed_process():
    PROCESSES.close()
    existing = _rendering()
    renderer = TemplateRenderer()
    assert renderer.render("{{ x }}", {"x": 1}) == "1"
    (process,) = _rendering() - existing
    process.kill()
    process.wait()
    assert renderer.render("{{ x }}", {"x": 2}) == "2"
    PROCESSES.close()
    assert _rendering() == existing


def test_many_threads_share_at_most_two_template_processes():
    PROCESSES.close()
    existing = _rendering()
    renderer = TemplateRenderer()
    texts = {}

    def render(number):
        texts[number] = renderer.render("{{ x }}" * 9999, {"x": number})

    threads = [threading.Thread(target=render, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: str(n) * 9999 for n in range(16)}
    assert 1 <= len(_rendering() - existing) <= 2
    PROCESSES.close()


def test_endless_chat_templates_of_one_model_do_not_delay_the_rendering_for_another():
    slow, ended = TemplateRenderer(), threading.Event()

    def render_endlessly():
        with pytest.raises(TemplateBoundsError):
            slow.render(ENDLESS["loops"], {})
        ended.set()

    threads = [threading.Thread(target=render_endlessly) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert TemplateRenderer().render("{{ x }}", {"x": 1}) == "1"
    assert not ended.is_set()
    for thread in threads:
        while thread.is_alive():
            for process in _rendering():
                process.kill()
            thread.join(0.1)


def test_template_process_ends_with_its_server():
    script = (
        "import os, psutil; from helexa.neuron.text.chat_template import TemplateRenderer;"
        "TemplateRenderer().render('x', {}); print(psutil.Process().children()[0].pid, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    with suppress(psutil.NoSuchProcess):
        orphan = psutil.Process(int(run.stdout))
        while orphan.status() != psutil.STATUS_ZOMBIE:  # the new parent process may not reap it
            time.sleep(0.01)


def _rendering() -> set[psutil.Process]:
    """Return the renderer processes that this process started."""
    renderers = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # the command line of a zombie is not readable
            if "helexa.neuron.text.template_sandbox_process" in child.cmdline():
                renderers.add(child)
    return renderers
