"""Length of the prompt prefix that does not change if the last user message is edited."""

import pytest

from helexa.neuron.text.chat_template import TemplateError
from helexa.neuron.text.model_text import ModelText
from neuron.text.conversations import (
    CLOCK_CALL,
    HELLO,
    HI,
    RESULT,
    SYSTEM,
    THOUGHT,
    TIME,
    TOOLS,
    WEATHER_CALL,
    WEATHER_MESSAGE,
    calling,
    text,
)

LAST_MESSAGE = "Will it rain on Sunday?"
EDITS = ["", "0", "1", "00", "\n\nx", "  y", "Will it snow?", "<think>", "🌤"]
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": LAST_MESSAGE}],
    "several turns": [SYSTEM, HELLO, HI, {"role": "user", "content": LAST_MESSAGE}],
    "thinking": [HELLO, THOUGHT, HELLO, HI | {"reasoning_content": "Hm."}, {"role": "user", "content": LAST_MESSAGE}],
    "results after the message": [
        SYSTEM,
        HELLO,
        HI,
        {"role": "user", "content": LAST_MESSAGE},
        calling(WEATHER_CALL),
        RESULT,
    ],
    "steps after the message": [
        HELLO,
        HI,
        {"role": "user", "content": LAST_MESSAGE},
        calling(WEATHER_CALL),
        RESULT,
        calling(CLOCK_CALL),
        TIME,
    ],
    "steps before the message": [
        WEATHER_MESSAGE,
        calling(WEATHER_CALL),
        RESULT,
        HI,
        {"role": "user", "content": LAST_MESSAGE},
    ],
}
CHATML = ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"]


def with_edited_last_message(messages, content):
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    return [*messages[:last], {"role": "user", "content": content}]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_stable_prompt_prefix_is_unchanged_by_any_edit_of_the_last_message(templates, vocabulary, conversation):
    messages = CONVERSATIONS[conversation]
    for name in CHATML:
        model = ModelText(vocabulary("qwen35"), templates[name], {})
        prompt, start = model.prompt_and_turn_start(messages, TOOLS)
        assert prompt == model.prompt_ids(messages, TOOLS)
        for edit in EDITS:
            assert model.prompt_ids(with_edited_last_message(messages, edit), TOOLS)[:start] == prompt[:start], (
                name,
                edit,
            )
        # The prefix is long: only the beginning of the turn separates it from the message.
        remainder = model.tokenizer.decode(prompt[start:], skip_special=False)
        assert remainder.partition(LAST_MESSAGE)[0] in ("user\n", "\n"), (name, remainder)


def test_stable_prompt_prefix_is_unchanged_by_last_message_edits_in_every_template(templates, vocabulary):
    messages = CONVERSATIONS["several turns"]
    long_enough = 0
    for name, source in templates.items():
        model = ModelText(vocabulary("qwen35"), source, {}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
        try:
            prompt, start = model.prompt_and_turn_start(messages)
        except TemplateError:
            continue
        for edit in ("", "0", "\n\nx"):
            assert model.prompt_ids(with_edited_last_message(messages, edit))[:start] == prompt[:start], (name, edit)
        long_enough += HI["content"] in model.tokenizer.decode(prompt[:start])
    assert long_enough > 60


def test_stable_prefix_is_the_same_for_content_parts_and_plain_text(templates, vocabulary):
    model = ModelText(vocabulary("qwen35"), templates["Qwen3.5-4B"], {})
    plain = [SYSTEM, HELLO, HI, {"role": "user", "content": LAST_MESSAGE}]
    assert (
        model.prompt_and_turn_start([*plain[:3], {"role": "user", "content": text(LAST_MESSAGE, "x")}])[1]
        == model.prompt_and_turn_start(plain)[1]
    )
    assert (
        model.prompt_and_turn_start([*plain[:3], {"role": "user", "content": text("0 or 1?")}])[1]
        == model.prompt_and_turn_start(plain)[1]
    )


def test_stable_prompt_prefix_depends_on_template_variables(templates, vocabulary):
    model = ModelText(vocabulary("qwen35"), templates["Qwen-Qwen3-0.6B"], {})
    messages = [HELLO, HI]
    variables = {"continue_final_message": True, "enable_thinking": False, "prompt": "?"}
    assert 0 < model.prompt_and_turn_start(messages, **variables)[1] == model.prompt_and_turn_start([HELLO])[1]


def test_stable_prompt_prefix_is_empty_without_a_user_message_or_stable_text(vocabulary):
    tokenizer = vocabulary("qwen35")
    assert ModelText(tokenizer, None, {}).prompt_and_turn_start([SYSTEM, HI])[1] == 0
    assert ModelText(tokenizer, "{{ messages[-1].content }} and more", {}).prompt_and_turn_start([HELLO])[1] == 0
    refusing = ModelText(tokenizer, "{% if messages | length < 2 %}{{ raise_exception('?') }}{% endif %}x y", {})
    assert refusing.prompt_and_turn_start([HELLO, HI])[1] == 0
    with pytest.raises(TemplateError):
        refusing.prompt_and_turn_start([HELLO])[1]


def first_difference(prompt, other):
    return next(index for index, pair in enumerate(zip(prompt, other, strict=False)) if pair[0] != pair[1])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_position_of_a_changed_token_is_attributed_to_the_edited_message(templates, vocabulary, conversation):
    messages = CONVERSATIONS[conversation]
    for name in ("Qwen-Qwen3-0.6B", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"):
        model = ModelText(vocabulary("qwen35"), templates[name], {})
        prompt = model.prompt_ids(messages, TOOLS)
        for index, message in enumerate(messages):
            if not message.get("content"):
                continue
            edited = [*messages[:index], message | {"content": f"~~ {message['content']}"}, *messages[index + 1 :]]
            position = first_difference(prompt, model.prompt_ids(edited, TOOLS))
            assert model.part_at(prompt, position, messages, TOOLS) == (index, message["role"]), name
        position = first_difference(prompt, model.prompt_ids(messages, TOOLS[:1]))
        assert model.part_at(prompt, position, messages, TOOLS) == (None, "tools"), name
        assert model.part_at(prompt, 0, messages, TOOLS)[0] in (None, 0), name


def test_changed_position_is_attributed_to_no_message_if_the_template_raises_an_error(vocabulary):
    source = "{% if '0' == messages[0].content %}{{ raise_exception('?') }}{% endif %}{{ messages[0].content }}"
    model = ModelText(vocabulary("qwen35"), source, {})
    assert model.part_at(model.prompt_ids([HELLO]), 0, [HELLO]) == (None, "")
