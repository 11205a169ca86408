"""The greedy tokens after images: equal for chunks, prefix hits, preemption, drafts and several ranks."""

from contextlib import closing

import pytest
from scheduler_runs import recorded_preemptions, scheduler_of

from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.native.native_ops import NativeOps
from nightly import daily
from reference.vision_language import TEXTS, Prompt, VisionLanguageModel, generate, picture

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, MANY_STEPS = 8, 80

NATIVE = {"dtype": "auto", "kernels": "auto"}
NATIVE_MODELS = [(name, NATIVE) for name in ("qwen3_5", "qwen3_vl", "gemma3", "gemma4")]
LIKE_OTHERS = (
    "qwen3_5_moe",
    "gemma4",
    "idefics3",
    "llava",
    "mistral3",
    "muse_glimmer",
)  # their images are handled as those of other models
MODELS = [(name, {}) for name in TEXTS] + NATIVE_MODELS


@pytest.fixture(
    scope="module", params=daily([model for model in MODELS if model[0] not in LIKE_OTHERS], MODELS), ids=str
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionLanguageModel:
    name, options = request.param
    model = VisionLanguageModel(tmp_path_factory.mktemp(name), name, 1, **options)
    assert (model.runner.ops.name == NativeOps.name) == (options == NATIVE)
    return model


def prompts_of(model: VisionLanguageModel) -> list[Prompt]:
    return [
        model.prompt(70, picture(200, 120, 1), 9),
        model.prompt(5, picture(96, 96, 2), picture(64, 160, 3), 40, seed=1),
        model.prompt(90, seed=2),
    ]


def alone(model: VisionLanguageModel, prompt: Prompt, steps: int = STEPS) -> list[int]:
    (tokens,) = generate(model.runner, [prompt.sequence(0, steps)], speculation=False, prefix_reuse="off")
    return tokens


@pytest.fixture(scope="module")
def outputs_alone(model: VisionLanguageModel) -> list[list[int]]:
    """The first `MANY_STEPS` tokens after each prompt of `prompts_of`, each computed alone."""
    return [alone(model, prompt, MANY_STEPS) for prompt in prompts_of(model)]


def starts(outputs: list[list[int]]) -> list[list[int]]:
    return [output[:STEPS] for output in outputs]


def test_second_image_is_the_only_one_encoded_after_a_prefix_cache_hit(model: VisionLanguageModel) -> None:
    first = model.prompt(70, picture(200, 120, 1), 80)
    both = model.prompt(first.tokens[:70], picture(200, 120, 1), first.tokens[-80:], picture(96, 96, 2), 9)
    assert both.tokens[: len(first.tokens)] == first.tokens
    scheduler = scheduler_of(model.runner, speculation=False)
    generate(model.runner, [first.sequence(0, STEPS)], scheduler)
    sequence = both.sequence(1, STEPS)
    encoder = model.runner.encoder
    assert encoder is not None
    encoded = encoder.encoded
    (tokens,) = generate(model.runner, [sequence], scheduler)
    assert sequence.cached >= PAGE_SIZE
    assert encoder.encoded <= encoded + 1
    assert tokens == alone(model, both)


def test_different_images_of_equal_size_share_no_cached_pages(model: VisionLanguageModel) -> None:
    text = model.prompt(PAGE_SIZE + 6).tokens
    scheduler = scheduler_of(model.runner, speculation=False)
    ends = [model.prompt(text, picture(96, 96, seed), 2 * PAGE_SIZE) for seed in (1, 2)]
    assert ends[0].tokens == ends[1].tokens
    generate(model.runner, [ends[0].sequence(0, STEPS)], scheduler)
    other, same = ends[1].sequence(1, STEPS), ends[0].sequence(2, STEPS)
    generate(model.runner, [other], scheduler)
    generate(model.runner, [same], scheduler)
    assert other.cached <= PAGE_SIZE
    assert same.cached >= 2 * PAGE_SIZE


@pytest.mark.parametrize("options", [{"max_step_tokens": 16}, {"speculation": True}, {}])
def test_chunks_batches_and_drafts_do_not_change_answers_to_prompts_with_images(
    model: VisionLanguageModel, outputs_alone: list[list[int]], options: dict[str, int]
) -> None:
    sequences = [prompt.sequence(number, STEPS) for number, prompt in enumerate(prompts_of(model))]
    assert generate(model.runner, sequences, **{"speculation": False} | options) == starts(outputs_alone)


def test_encoder_cache_smaller_than_an_image_does_not_change_the_tokens(
    model: VisionLanguageModel, outputs_alone: list[list[int]]
) -> None:
    prompts = prompts_of(model)[:2]
    with closing(model.load(image_cache_mb=0)) as runner:
        sequences = [prompt.sequence(number, STEPS) for number, prompt in enumerate(prompts)]
        tokens = generate(runner, sequences, max_step_tokens=16, speculation=False)
        assert runner.encoder is not None
        assert runner.encoder.encoded >= 3
    assert tokens == starts(outputs_alone[:2])


def test_preemption_does_not_change_answers_to_prompts_with_images(
    model: VisionLanguageModel, outputs_alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = recorded_preemptions(monkeypatch)
    prompts = prompts_of(model)
    pages = max(-(-(len(prompt.tokens) + MANY_STEPS) // PAGE_SIZE) for prompt in prompts) + 3
    scheduler = scheduler_of(model.runner, pages, speculation=False)
    sequences = [prompt.sequence(number, MANY_STEPS) for number, prompt in enumerate(prompts)]
    assert generate(model.runner, sequences, scheduler) == outputs_alone
    assert preempted


@pytest.mark.parametrize("model", daily(NATIVE_MODELS, MODELS), indirect=True, ids=str)
def test_two_ranks_give_the_same_tokens_as_one_for_prompts_with_images(model: VisionLanguageModel) -> None:
    prompts = prompts_of(model)[:2]
    with closing(model.load(tensor_parallel=2)) as runner:
        sequences = [prompt.sequence(number, STEPS) for number, prompt in enumerate(prompts)]
        tokens = generate(runner, sequences, speculation=False, prefix_reuse="off")
    assert tokens == [alone(model, prompt) for prompt in prompts]
