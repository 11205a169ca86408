"""How much of a prompt stays when its last user message is said anew."""

import pytest

from helexa.neuron.text.model_text import ModelText
from helexa.neuron.text.templates.chat_template import TemplateError
from neuron.text.conversations import (
    ASK,
    HELLO,
    HI,
    LOOK,
    QUESTION,
    RESULT,
    SYSTEM,
    THOUGHT,
    TIME,
    TOOLS,
    calling,
    text,
)

ASKED = "Will it rain on Sunday?"
EDITS = ["", "0", "1", "00", "\n\nx", "  y", "Will it snow?", "<think>", "🌤"]
CONVERSATIONS = {
    "a question": [{"role": "user", "content": ASKED}],
    "several turns": [SYSTEM, HELLO, HI, {"role": "user", "content": ASKED}],
    "thinking": [HELLO, THOUGHT, HELLO, HI | {"reasoning_content": "Hm."}, {"role": "user", "content": ASKED}],
    "results after it": [SYSTEM, HELLO, HI, {"role": "user", "content": ASKED}, calling(ASK), RESULT],
    "steps after it": [HELLO, HI, {"role": "user", "content": ASKED}, calling(ASK), RESULT, calling(LOOK), TIME],
    "steps before it": [QUESTION, calling(ASK), RESULT, HI, {"role": "user", "content": ASKED}],
}
CHATML = ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"]


def said_anew(messages, content):
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    return [*messages[:last], {"role": "user", "content": content}]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_it_is_the_beginning_that_every_edit_leaves(templates, vocabulary, conversation):
    messages = CONVERSATIONS[conversation]
    for name in CHATML:
        model = ModelText(vocabulary("qwen35"), templates[name], {})
        prompt, start = model.prompt_and_turn_start(messages, TOOLS)
        assert prompt == model.prompt_ids(messages, TOOLS)
        for edit in EDITS:
            assert model.prompt_ids(said_anew(messages, edit), TOOLS)[:start] == prompt[:start], (name, edit)
        # And it reaches into the turn's beginning: nothing but that stands before the message.
        rest = model.tokenizer.decode(prompt[start:], skip_special=False)
        assert rest.partition(ASKED)[0] in ("user\n", "\n"), (name, rest)


def test_every_template_gives_a_beginning_that_edits_leave(templates, vocabulary):
    messages = CONVERSATIONS["several turns"]
    long_enough = 0
    for name, source in templates.items():
        model = ModelText(vocabulary("qwen35"), source, {}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
        try:
            prompt, start = model.prompt_and_turn_start(messages)
        except TemplateError:
            continue
        for edit in ("", "0", "\n\nx"):
            assert model.prompt_ids(said_anew(messages, edit))[:start] == prompt[:start], (name, edit)
        long_enough += HI["content"] in model.tokenizer.decode(prompt[:start])
    assert long_enough > 60


def test_parts_are_said_anew_too(templates, vocabulary):
    model = ModelText(vocabulary("qwen35"), templates["Qwen3.5-4B"], {})
    plain = [SYSTEM, HELLO, HI, {"role": "user", "content": ASKED}]
    assert (
        model.prompt_and_turn_start([*plain[:3], {"role": "user", "content": text(ASKED, "x")}])[1]
        == model.prompt_and_turn_start(plain)[1]
    )
    assert (
        model.prompt_and_turn_start([*plain[:3], {"role": "user", "content": text("0 or 1?")}])[1]
        == model.prompt_and_turn_start(plain)[1]
    )


def test_variables_are_heeded(templates, vocabulary):
    model = ModelText(vocabulary("qwen35"), templates["Qwen-Qwen3-0.6B"], {})
    messages = [HELLO, HI]
    variables = {"continue_final_message": True, "enable_thinking": False, "prompt": "?"}
    assert 0 < model.prompt_and_turn_start(messages, **variables)[1] == model.prompt_and_turn_start([HELLO])[1]


def test_nothing_stays(vocabulary):
    tokenizer = vocabulary("qwen35")
    assert ModelText(tokenizer, None, {}).prompt_and_turn_start([SYSTEM, HI])[1] == 0
    assert ModelText(tokenizer, "{{ messages[-1].content }} and more", {}).prompt_and_turn_start([HELLO])[1] == 0
    refusing = ModelText(tokenizer, "{% if messages | length < 2 %}{{ raise_exception('?') }}{% endif %}x y", {})
    assert refusing.prompt_and_turn_start([HELLO, HI])[1] == 0
    with pytest.raises(TemplateError):
        refusing.prompt_and_turn_start([HELLO])[1]
