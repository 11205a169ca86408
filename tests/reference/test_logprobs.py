"""Log-probabilities against those of transformers, on random weights in float32."""

from pathlib import Path

import pytest
import torch
from driving import scheduler_of
from transformers import PreTrainedModel

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, Logprob, SamplingParams, TokenOutput
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.sequence import Sequence
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7 * n % 101 for n in range(length)] for length in (1, 5, 70, 130)]
REPEATING = [*range(20, 60)] * 4
TOKENS = 24
SETTINGS = [
    SamplingParams(temperature=0, logprobs=20),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=1.7, seed=3, logprobs=3),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.8, min_p=0.1, seed=4, logprobs=1),
    SamplingParams(
        temperature=0.9, seed=5, repetition_penalty=1.4, presence_penalty=1, frequency_penalty=1, logprobs=2
    ),
    SamplingParams(temperature=0, logit_bias={5: 60.0}, logprobs=4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return tiny_model(
        folder,
        model_type="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="module")
def runner(folder: Path, reference: PreTrainedModel) -> Runner:
    return load_once(folder, EngineOptions(dtype="float32", kv_cache_mb=16))


def answers(runner: Runner, requests: list[Generate], **options: object) -> dict[int, TokenOutput]:
    """All that was said of each, as one output, whose `cached_tokens` counts the steps that said it."""
    scheduler = scheduler_of(runner, prefix_reuse="off", **options)
    for request in requests:
        assert scheduler.add(Sequence(request)) is None
    said = {request.id: TokenOutput(id=request.id) for request in requests}
    while not scheduler.idle:
        plan = scheduler.plan()
        outcome = runner.run(build_step(plan))
        for output in scheduler.commit(plan, outcome.tokens, None, outcome.logprobs, outcome.hidden, outcome.scores):
            before = said[output.id]
            said[output.id] = TokenOutput(
                id=output.id,
                tokens=before.tokens + output.tokens,
                logprobs=before.logprobs + output.logprobs,
                prompt_logprobs=before.prompt_logprobs + output.prompt_logprobs,
                finish=output.finish,
                cached_tokens=before.cached_tokens + 1,
            )
    return said


def request(number: int, prompt: list[int], sampling: SamplingParams) -> Generate:
    return Generate(id=number, prompt=prompt, max_tokens=TOKENS, sampling=sampling)


def assert_right(reference: PreTrainedModel, asked: Generate, said: TokenOutput) -> None:
    with torch.inference_mode():
        logits = reference(torch.tensor([asked.prompt + said.tokens])).logits[0, len(asked.prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    count = asked.sampling.logprobs
    assert count is not None
    assert len(said.logprobs) == len(said.tokens) == TOKENS
    for token, (logprob, top), row in zip(said.tokens, said.logprobs, expected, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert [float(row[other]) for other, _ in top] == pytest.approx([value for _, value in top], abs=1e-4)
        assert len({other for other, _ in top}) == count


@pytest.mark.parametrize("sampling", SETTINGS)
def test_whatever_chooses_they_are_the_models_own(
    reference: PreTrainedModel, runner: Runner, sampling: SamplingParams
) -> None:
    requests = [request(number, prompt, sampling) for number, prompt in enumerate(PROMPTS)]
    for number, said in answers(runner, requests, max_step_tokens=48).items():
        assert_right(reference, requests[number], said)


def test_each_row_of_a_batch_has_what_it_asks_for(reference: PreTrainedModel, runner: Runner) -> None:
    silent = [SamplingParams(temperature=0), SamplingParams(temperature=1.2, top_k=7, seed=1)]
    requests = [request(number, PROMPTS[3], sampling) for number, sampling in enumerate([*SETTINGS, *silent])]
    together = answers(runner, requests)
    for asked in requests:
        said = together[asked.id]
        (alone,) = answers(runner, [asked]).values()
        assert said.tokens == alone.tokens
        if asked.sampling.logprobs is None:
            assert said.logprobs == []
        else:
            assert_right(reference, asked, said)
            assert [value for value, _ in said.logprobs] == pytest.approx([v for v, _ in alone.logprobs], abs=1e-4)


def test_drafts_that_were_right_have_them_too(reference: PreTrainedModel, runner: Runner) -> None:
    # The bias makes the text repeat itself, and the model's own opinion of it is another.
    sampling = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(20, 60), 40.0), logprobs=5)
    asked = request(0, REPEATING, sampling)
    (guessed,) = answers(runner, [asked]).values()
    assert guessed.cached_tokens < TOKENS, "no draft was taken up"
    assert_right(reference, asked, guessed)
    (plain,) = answers(runner, [asked], speculation=False).values()
    assert guessed.tokens == plain.tokens


def assert_scored(reference: PreTrainedModel, prompt: list[int], alternatives: int, scores: list[Logprob]) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert len(scores) == len(prompt) - 1
    for token, (logprob, top), row in zip(prompt[1:], scores, expected, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in top] == pytest.approx(row.topk(alternatives).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_tokens_have_the_models_log_probabilities(
    reference: PreTrainedModel, runner: Runner, max_tokens: int
) -> None:
    """In chunks that share steps."""
    sampling = SamplingParams(temperature=0, logprobs=1)
    requests = [
        Generate(id=number, prompt=prompt, max_tokens=max_tokens, sampling=sampling, prompt_logprobs=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    for number, said in answers(runner, requests, max_step_tokens=48).items():
        assert_scored(reference, PROMPTS[number], number, said.prompt_logprobs)
        assert (len(said.tokens), len(said.logprobs), said.finish) == (max_tokens, max_tokens, "length")


def test_scores_are_the_same_after_a_preemption_and_beside_a_cached_prefix(
    reference: PreTrainedModel, runner: Runner
) -> None:
    prompt = PROMPTS[3]
    scheduler = scheduler_of(runner, max_step_tokens=48)
    scores: list[Logprob] = []

    def step() -> None:
        plan = scheduler.plan()
        outcome = runner.run(build_step(plan))
        for output in scheduler.commit(plan, outcome.tokens, None, outcome.logprobs, outcome.hidden, outcome.scores):
            scores.extend(output.prompt_logprobs)

    scheduler.add(Sequence(Generate(id=0, prompt=prompt, max_tokens=1, sampling=SamplingParams(temperature=0))))
    while not scheduler.idle:
        step()
    scheduler.add(Sequence(Generate(id=1, prompt=prompt, max_tokens=0, sampling=SamplingParams(), prompt_logprobs=2)))
    step()
    plan = scheduler.plan()
    runner.run(build_step(plan))
    scheduler.isolate(plan * 2, "failed")  # it begins anew
    while not scheduler.idle:
        step()
    assert_scored(reference, prompt, 2, scores)
    scheduler.check_idle()
