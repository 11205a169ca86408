"""Prompts with images give the logits and the greedy tokens of transformers in float32."""

from pathlib import Path

import pytest
import torch

from nightly import daily
from reference.vision_language import TEXTS, Prompt, VisionLanguageModel, generate_with_logits, picture

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 8
SEED = 1  # with this seed, no two logits nearly tie


@pytest.fixture(scope="module", params=TEXTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionLanguageModel:
    return VisionLanguageModel(tmp_path_factory.mktemp(request.param), request.param, SEED)


def assert_equal_to_transformers(model: VisionLanguageModel, prompts: list[Prompt], chunk: int) -> None:
    sequences = [prompt.sequence(number, STEPS) for number, prompt in enumerate(prompts)]
    answers = generate_with_logits(model.runner, sequences, max_step_tokens=chunk)
    for prompt, (tokens, logits) in zip(prompts, answers, strict=True):
        expected = model.logits(prompt, tokens)[len(prompt.tokens) - 1 : -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [1024, 16])
def test_logits_of_prompts_with_images_equal_those_of_transformers(model: VisionLanguageModel, chunk: int) -> None:
    """One image, several, odd sizes and text only, in one batch, whole and in chunks."""
    prompts = [
        model.prompt(5, picture(64, 64), 9),
        model.prompt(picture(200, 120, 1), picture(33, 250, 2), 3, seed=1),
        model.prompt(70, seed=2),
        model.prompt(60, picture(300, 300, 3), 20, picture(96, 96, 4), 1, seed=3),
    ]
    assert_equal_to_transformers(model, prompts, chunk)


@pytest.mark.parametrize("model_type", daily(["gemma4"], ["gemma3", "gemma4"]))
def test_logits_with_rounded_activations_stay_close_to_transformers(model_type: str, tmp_path: Path) -> None:
    """Test the kernels chosen for this machine on images whose tokens attend to their whole image."""
    model = VisionLanguageModel(tmp_path, model_type, SEED, dtype="auto", kernels="auto")
    prompt = model.prompt(60, picture(200, 120, 3), 20, picture(96, 96, 4), 9)
    ((tokens, logits),) = generate_with_logits(model.runner, [prompt.sequence(0, STEPS)])
    expected = model.logits(prompt, tokens)[len(prompt.tokens) - 1 : -1]
    assert ((logits - expected).norm(dim=-1) < 0.04 * expected.norm(dim=-1)).all()
