"""Log probabilities compared with transformers, on random weights in float32."""

from pathlib import Path

import pytest
import torch
from scheduler_runs import scheduler_of
from transformers import PreTrainedModel

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, Logprob, SamplingParams, TokenOutput
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


def run_all(runner: Runner, requests: list[Generate], **options: object) -> dict[int, TokenOutput]:
    """Run all requests and merge the outputs of each. `cached_tokens` counts the steps that returned tokens."""
    scheduler = scheduler_of(runner, prefix_reuse="off", **options)
    for request in requests:
        assert scheduler.add(Sequence(request)) is None
    merged = {request.id: TokenOutput(id=request.id) for request in requests}
    while not scheduler.idle:
        plan = scheduler.plan()
        outcome = runner.launch(build_step(plan)).read()
        for output in scheduler.commit(plan, outcome.tokens, None, outcome.logprobs, outcome.hidden, outcome.scores):
            previous = merged[output.id]
            merged[output.id] = TokenOutput(
                id=output.id,
                tokens=previous.tokens + output.tokens,
                logprobs=previous.logprobs + output.logprobs,
                prompt_logprobs=previous.prompt_logprobs + output.prompt_logprobs,
                finish=output.finish,
                cached_tokens=previous.cached_tokens + 1,
            )
    return merged


def request(number: int, prompt: list[int], sampling: SamplingParams) -> Generate:
    return Generate(id=number, prompt=prompt, max_tokens=TOKENS, sampling=sampling)


def assert_right(reference: PreTrainedModel, client_request: Generate, output: TokenOutput) -> None:
    with torch.inference_mode():
        logits = reference(torch.tensor([client_request.prompt + output.tokens])).logits[
            0, len(client_request.prompt) - 1 : -1
        ]
    expected = logits.log_softmax(-1)
    count = client_request.sampling.logprobs
    assert count is not None
    assert len(output.logprobs) == len(output.tokens) == TOKENS
    for token, (logprob, top), row in zip(output.tokens, output.logprobs, expected, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert [float(row[candidate]) for candidate, _ in top] == pytest.approx([value for _, value in top], abs=1e-4)
        assert len({candidate for candidate, _ in top}) == count


@pytest.mark.parametrize("sampling", SETTINGS)
def test_log_probabilities_do_not_depend_on_sampling_settings(
    reference: PreTrainedModel, runner: Runner, sampling: SamplingParams
) -> None:
    requests = [request(number, prompt, sampling) for number, prompt in enumerate(PROMPTS)]
    for number, output in run_all(runner, requests, max_step_tokens=48).items():
        assert_right(reference, requests[number], output)


def test_each_sequence_of_a_batch_gets_its_own_log_probabilities(reference: PreTrainedModel, runner: Runner) -> None:
    silent = [SamplingParams(temperature=0), SamplingParams(temperature=1.2, top_k=7, seed=1)]
    requests = [request(number, PROMPTS[3], sampling) for number, sampling in enumerate([*SETTINGS, *silent])]
    together = run_all(runner, requests)
    for client_request in requests:
        output = together[client_request.id]
        (separately,) = run_all(runner, [client_request]).values()
        assert output.tokens == separately.tokens
        if client_request.sampling.logprobs is None:
            assert output.logprobs == []
        else:
            assert_right(reference, client_request, output)
            assert [value for value, _ in output.logprobs] == pytest.approx(
                [v for v, _ in separately.logprobs], abs=1e-4
            )


def test_tokens_of_accepted_drafts_have_correct_log_probabilities(reference: PreTrainedModel, runner: Runner) -> None:
    # The bias makes the text repeat, so that drafts are accepted; logprobs are from before the bias.
    sampling = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(20, 60), 40.0), logprobs=5)
    client_request = request(0, REPEATING, sampling)
    (guessed,) = run_all(runner, [client_request]).values()
    assert guessed.cached_tokens < TOKENS, "no draft was taken up"
    assert_right(reference, client_request, guessed)
    (plain,) = run_all(runner, [client_request], speculation=False).values()
    assert guessed.tokens == plain.tokens


def assert_scored(reference: PreTrainedModel, prompt: list[int], alternatives: int, scores: list[Logprob]) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert len(scores) == len(prompt) - 1
    for token, (logprob, top), row in zip(prompt[1:], scores, expected, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in top] == pytest.approx(row.topk(alternatives).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_probabilities_of_prompt_tokens_match_transformers(
    reference: PreTrainedModel, runner: Runner, max_tokens: int
) -> None:
    """Prompts are computed in chunks that share steps."""
    sampling = SamplingParams(temperature=0, logprobs=1)
    requests = [
        Generate(id=number, prompt=prompt, max_tokens=max_tokens, sampling=sampling, prompt_logprobs=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    for number, output in run_all(runner, requests, max_step_tokens=48).items():
        assert_scored(reference, PROMPTS[number], number, output.prompt_logprobs)
        assert (len(output.tokens), len(output.logprobs), output.finish) == (max_tokens, max_tokens, "length")


def test_log_probabilities_of_prompt_tokens_survive_preemption_and_prefix_reuse(
    reference: PreTrainedModel, runner: Runner
) -> None:
    prompt = PROMPTS[3]
    scheduler = scheduler_of(runner, max_step_tokens=48)
    scores: list[Logprob] = []

    def step() -> None:
        plan = scheduler.plan()
        outcome = runner.launch(build_step(plan)).read()
        for output in scheduler.commit(plan, outcome.tokens, None, outcome.logprobs, outcome.hidden, outcome.scores):
            scores.extend(output.prompt_logprobs)

    scheduler.add(Sequence(Generate(id=0, prompt=prompt, max_tokens=1, sampling=SamplingParams(temperature=0))))
    while not scheduler.idle:
        step()
    scheduler.add(Sequence(Generate(id=1, prompt=prompt, max_tokens=0, sampling=SamplingParams(), prompt_logprobs=2)))
    step()
    plan = scheduler.plan()
    runner.launch(build_step(plan)).read()
    scheduler.isolate(plan * 2, "failed")  # the sequence starts again
    while not scheduler.idle:
        step()
    assert_scored(reference, prompt, 2, scores)
    scheduler.check_idle()
