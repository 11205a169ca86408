"""Prompts whose placeholders or image tokens do not match the images are rejected with one clear line."""

import pytest

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.scheduling.prompt_images import ImageTraits, PromptImages
from helexa.neuron.vision.image_tokens_and_errors import Grid, ImageError, ImageLayout, ImageRange, expanded_tokens
from helexa.neuron.vision.model_vision import image_text, token_limit

ONE = ImageLayout(((64, 96),), (Grid(6, 4),), 6)
SPLIT = ImageLayout(((64, 32), (64, 32)), (Grid(4, 4),) * 3, 12, Grid(1, 2))
PAD = "<|image_pad|>"


def test_each_image_placeholder_is_replaced_by_the_text_for_its_tiles() -> None:
    text = image_text("idefics3").expanded("<image> and <image>.", [SPLIT, ONE])
    assert text == (
        "<fake_token_around_image><row_1_col_1><image><fake_token_around_image><row_1_col_2><image>\n"
        "\n<fake_token_around_image><global-img><image><fake_token_around_image> and "
        "<fake_token_around_image><global-img><image><fake_token_around_image>."
    )


def test_prompt_without_images_is_unchanged() -> None:
    assert image_text("qwen3_5").expanded("a text", []) == "a text"
    assert expanded_tokens([1, 2], 9, []) == ([1, 2], [])


def test_image_placeholder_token_in_a_message_is_rejected() -> None:
    with pytest.raises(ImageError, match=r"text of a message contains '<\|image_pad\|>', which is reserved"):
        image_text("qwen3_5").expanded(f"{PAD} what does {PAD} mean?", [ONE])


def test_chat_template_that_drops_images_raises_an_image_error() -> None:
    with pytest.raises(ImageError, match="chat template inserts 1 of 2 images"):
        image_text("qwen3_5").expanded(f"{PAD}?", [ONE, ONE])


def test_image_prompt_for_an_unknown_architecture_is_rejected() -> None:
    with pytest.raises(ModelFileError, match="unsupported vision architecture 'llama'; supported: qwen3_5, "):
        image_text("llama")


def test_image_token_is_repeated_for_the_tokens_of_each_tile() -> None:
    tokens, ranges = expanded_tokens([1, 9, 2, 9, 3, 9, 9, 4], 9, [SPLIT, ONE])
    assert tokens == [1, *[9] * 4, 2, *[9] * 4, 3, *[9] * 4, *[9] * 6, 4]
    assert ranges == [ImageRange(0, 0, 1, 4), ImageRange(0, 4, 6, 4), ImageRange(0, 8, 11, 4), ImageRange(1, 0, 15, 6)]


@pytest.mark.parametrize("tokens", [[1, 2], [9, 1, 9]])
def test_prompt_with_too_few_or_too_many_image_tokens_is_rejected(tokens: list[int]) -> None:
    with pytest.raises(ImageError, match=rf"prompt has {tokens.count(9)} image tokens instead of 1; "):
        expanded_tokens(tokens, 9, [ONE])


def test_tokens_of_an_image_attend_to_the_whole_image() -> None:
    ranges = [ImageRange(0, 0, 1, 3), ImageRange(1, 0, 4, 2)]
    request = Generate(id=0, prompt=[0] * 8, max_tokens=1, sampling=SamplingParams(), image_ranges=ranges)
    images = PromptImages(request, ImageTraits(whole=True))
    ends = images.attention_ends(0, 7)
    assert ends is not None
    assert ends.tolist() == [1, 4, 4, 4, 6, 6, 7]
    assert images.attention_ends(6, 8) is None


@pytest.mark.parametrize(
    ("detail", "maximum", "limit"),
    [("auto", 4096, 4096), ("high", 4096, 4096), ("original", 64, 64), ("low", 4096, 256), ("low", 64, 64)],
)
def test_field_detail_limits_the_number_of_image_tokens(detail: str, maximum: int, limit: int) -> None:
    assert token_limit(detail, maximum) == limit


def test_unknown_value_of_the_image_field_detail_is_rejected() -> None:
    with pytest.raises(ImageError, match="'detail' of an image is 'medium', supported: auto, low, high, original"):
        token_limit("medium", 4096)
