"""The sampler, compared row by row with distributions computed by hand."""

from collections import Counter

import numpy as np
import pytest
import torch

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step, sampled_rows, sampling_of
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_output_logprobs_and_pooling import RejectionMasks, Sampled
from helexa.neuron.ops.kernel_header import NON_FINITE
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.sampling import uniforms

Row = tuple[Sequence, tuple[int, ...]]
VOCABULARY = 1000
OPS = ReferenceOps(torch.device("cpu"), torch.float32)


def sample(logits: torch.Tensor, rows: list[Row], rejection_masks: RejectionMasks | None = None) -> list[int]:
    return Sampled(OPS, logits, sampling_of(rows)).read(rejection_masks)


def row(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    drafts: tuple[int, ...] = (),
    **settings: object,
) -> Row:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    sequence = Sequence(Generate(id=0, prompt=prompt or [1], max_tokens=99, sampling=params))
    sequence.tokens += output or []
    return sequence, drafts


def logits(**values: float) -> torch.Tensor:
    """Return logits of one row: `t<id>=logit` sets the logit of a token, and all other logits are -50."""
    out = torch.full((1, VOCABULARY), -50.0)
    for name, value in values.items():
        out[0, int(name[1:])] = value
    return out


def frequencies(base: torch.Tensor, draws: int = 2000, **settings: object) -> dict[int, float]:
    rows = [row(seed=seed, **settings) for seed in range(draws)]
    counts = Counter(sample(base.repeat(draws, 1), rows))
    return {token: count / draws for token, count in counts.items()}


def test_temperature_0_selects_the_token_with_the_largest_logit() -> None:
    assert sample(logits(t3=1.0, t4=2.0), [row(temperature=0.0)]) == [4]


def test_sampled_token_frequencies_follow_the_softmax() -> None:
    shares = frequencies(logits(t3=0.0, t4=1.0986123))  # 1 : 3
    assert shares[4] == pytest.approx(0.75, abs=0.04)
    assert shares[3] == pytest.approx(0.25, abs=0.04)


def test_temperature_below_1_sharpens_the_distribution() -> None:
    shares = frequencies(logits(t3=0.0, t4=1.0986123), temperature=0.5)  # 1 : 9
    assert shares[4] == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 1}, {1}),
        ({"top_p": 0.45}, {1}),
        ({"top_p": 0.6}, {1, 2}),
        ({"top_p": 0.99}, {1, 2, 3, 4}),
        ({"min_p": 0.5}, {1, 2}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.6}, {1, 2}),
    ],
)
def test_top_k_top_p_and_min_p_allow_exactly_the_expected_tokens(settings: dict[str, float], allowed: set[int]) -> None:
    base = torch.tensor([0.5, 0.3, 0.12, 0.08]).log()
    values = {f"t{token}": float(value) for token, value in zip((1, 2, 3, 4), base, strict=True)}
    assert set(frequencies(logits(**values), 1500, **settings)) == allowed


def test_top_p_is_exact_even_if_more_tokens_remain_than_the_candidate_list_holds() -> None:
    flat = torch.zeros(1, VOCABULARY)
    flat[0, 500:] = -30.0
    shares = frequencies(flat, 4000, top_p=0.9)
    assert set(shares) <= set(range(500))
    assert len(shares) > 300


def test_repetition_penalty_lowers_positive_and_negative_logits_of_prompt_and_output_tokens() -> None:
    base = logits(t3=2.0, t4=1.5)
    assert sample(base.clone(), [row(prompt=[3], temperature=0.0, repetition_penalty=2.0)]) == [4]
    assert sample(base.clone(), [row(output=[3], temperature=0.0, repetition_penalty=2.0)]) == [4]
    negative = torch.full((1, VOCABULARY), -9.0)
    negative[0, 3], negative[0, 4] = -1.0, -1.5
    assert sample(negative, [row(prompt=[3], temperature=0.0, repetition_penalty=2.0)]) == [4]


def test_frequency_and_presence_penalties_apply_to_output_tokens_only() -> None:
    base = logits(t3=2.0, t4=1.5)
    greedy = {"temperature": 0.0}
    assert sample(base.clone(), [row(prompt=[3], **greedy, presence_penalty=1.0)]) == [3]
    assert sample(base.clone(), [row(output=[3], **greedy, presence_penalty=1.0)]) == [4]
    assert sample(base.clone(), [row(output=[3], **greedy, frequency_penalty=0.3)]) == [3]
    assert sample(base.clone(), [row(output=[3, 3], **greedy, frequency_penalty=0.3)]) == [4]


def test_logit_bias_raises_or_lowers_the_logit_of_a_token() -> None:
    assert sample(logits(t3=2.0, t4=1.5), [row(temperature=0.0, logit_bias={4: 1.0, 3: -0.1})]) == [4]


def test_output_penalties_count_earlier_output_that_is_part_of_the_prompt() -> None:
    base = logits(t3=1.0, t4=0.5)
    for penalty in ("presence_penalty", "frequency_penalty"):
        params = SamplingParams(temperature=0.0, **{penalty: 1.0})
        for prior_output, chosen in ((1, 4), (0, 3)):
            request = Generate(id=0, prompt=[1, 2, 3], max_tokens=9, sampling=params, prior_output=prior_output)
            assert sample(base.clone(), [(Sequence(request), ())]) == [chosen]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.5, "seed": 11},
        {"temperature": 0.8, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    ],
)
def test_token_sampled_after_drafts_equals_the_token_after_the_same_tokens_as_output(
    settings: dict[str, float],
) -> None:
    torch.manual_seed(0)
    output, drafts = [5, 6, 5], (7, 5, 9)
    sequence, _ = row(output=output, **settings)
    rows = list(sampled_rows([PlanEntry(sequence, len(sequence.tokens), drafts)]))
    assert [row_drafts for _, row_drafts in rows] == [(), (7,), (7, 5), drafts]
    assert sampling_of(rows).positions.tolist() == [4, 5, 6, 7]
    base = torch.randn(len(rows), VOCABULARY)
    expected = [
        sample(base[i : i + 1].clone(), [row(output=[*output, *drafts[:i]], **settings)])[0] for i in range(len(rows))
    ]
    assert sample(base, rows) == expected


def test_step_has_sampling_rows_only_for_sequences_that_sample_a_token() -> None:
    sequence, _ = row(prompt=[1, 2, 3])
    sequence.pages = [0]
    assert build_step([PlanEntry(sequence, 2)]).sampling is None
    sampling = build_step([PlanEntry(sequence, 3)]).sampling
    assert sampling is not None
    assert sampling.positions.tolist() == [3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}])
def test_row_with_non_finite_logits_is_marked_and_changes_no_other_row(
    value: float, settings: dict[str, float]
) -> None:
    finite = torch.randn(1, VOCABULARY)
    (expected,) = sample(finite.clone(), [row(**settings)])
    broken = torch.full((1, VOCABULARY), value)
    assert sample(torch.cat((broken, finite)), [row(**settings)] * 2) == [NON_FINITE, expected]


def test_rows_of_one_batch_are_sampled_with_their_own_settings() -> None:
    base = logits(t3=0.0, t4=1.0)
    rows = [
        row(temperature=0.0),
        row(temperature=5.0, top_k=1, seed=1),
        row(temperature=0.0, logit_bias={3: 9.0}),
        row(temperature=0.0, output=[4], presence_penalty=2.0),
        row(temperature=9.0, seed=3),
    ]
    together = sample(base.repeat(len(rows), 1), rows)
    assert together == [sample(base.clone(), [single])[0] for single in rows]
    assert together[:4] == [4, 4, 3, 3]


def test_random_numbers_depend_only_on_seed_and_position_and_are_uniform() -> None:
    pairs = [(seed, position) for seed in range(60) for position in range(60)]
    seeds, positions = np.array(pairs).T
    seeds = seeds.astype(np.uint64)
    values = uniforms(seeds, positions).tolist()
    assert uniforms(seeds[70:73], positions[70:73]).tolist() == values[70:73], "draws are independent of each other"
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.02)
    assert sum(value < 0.1 for value in values) / len(values) == pytest.approx(0.1, abs=0.02)
