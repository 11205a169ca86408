"""The sampler, row by row, against distributions worked out by hand."""

from collections import Counter

import numpy as np
import pytest
import torch

from helexa.neuron.engine.execution.step_builder import build_step, sampled_rows, sampling_of
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.sampling.sampler import Refused, launch, uniforms
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.constants import NON_FINITE
from helexa.neuron.ops.reference.reference import ReferenceOps

Row = tuple[Sequence, tuple[int, ...]]
VOCABULARY = 1000
OPS = ReferenceOps(torch.device("cpu"), torch.float32)


def sample(logits: torch.Tensor, rows: list[Row], refused: Refused | None = None) -> list[int]:
    return launch(OPS, logits, sampling_of(rows)).read(refused)


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
    """Very unlikely everywhere but at `t<id>=logit`."""
    out = torch.full((1, VOCABULARY), -50.0)
    for name, value in values.items():
        out[0, int(name[1:])] = value
    return out


def frequencies(base: torch.Tensor, draws: int = 2000, **settings: object) -> dict[int, float]:
    rows = [row(seed=seed, **settings) for seed in range(draws)]
    counts = Counter(sample(base.repeat(draws, 1), rows))
    return {token: count / draws for token, count in counts.items()}


def test_greedy_takes_the_largest_logit() -> None:
    assert sample(logits(t3=1.0, t4=2.0), [row(temperature=0.0)]) == [4]


def test_sampling_follows_the_softmax() -> None:
    seen = frequencies(logits(t3=0.0, t4=1.0986123))  # 1 : 3
    assert seen[4] == pytest.approx(0.75, abs=0.04)
    assert seen[3] == pytest.approx(0.25, abs=0.04)


def test_temperature_sharpens() -> None:
    seen = frequencies(logits(t3=0.0, t4=1.0986123), temperature=0.5)  # 1 : 9
    assert seen[4] == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize(
    ("settings", "kept"),
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
def test_truncation_keeps_exactly_the_right_tokens(settings: dict[str, float], kept: set[int]) -> None:
    base = torch.tensor([0.5, 0.3, 0.12, 0.08]).log()
    values = {f"t{token}": float(value) for token, value in zip((1, 2, 3, 4), base, strict=True)}
    assert set(frequencies(logits(**values), 1500, **settings)) == kept


def test_a_nucleus_wider_than_the_candidates_is_still_exact() -> None:
    flat = torch.zeros(1, VOCABULARY)
    flat[0, 500:] = -30.0
    seen = frequencies(flat, 4000, top_p=0.9)
    assert set(seen) <= set(range(500))
    assert len(seen) > 300


def test_repetition_penalty_covers_prompt_and_output_in_both_signs() -> None:
    base = logits(t3=2.0, t4=1.5)
    assert sample(base.clone(), [row(prompt=[3], temperature=0.0, repetition_penalty=2.0)]) == [4]
    assert sample(base.clone(), [row(output=[3], temperature=0.0, repetition_penalty=2.0)]) == [4]
    negative = torch.full((1, VOCABULARY), -9.0)
    negative[0, 3], negative[0, 4] = -1.0, -1.5
    assert sample(negative, [row(prompt=[3], temperature=0.0, repetition_penalty=2.0)]) == [4]


def test_frequency_and_presence_penalties_cover_the_output_only() -> None:
    base = logits(t3=2.0, t4=1.5)
    greedy = {"temperature": 0.0}
    assert sample(base.clone(), [row(prompt=[3], **greedy, presence_penalty=1.0)]) == [3]
    assert sample(base.clone(), [row(output=[3], **greedy, presence_penalty=1.0)]) == [4]
    assert sample(base.clone(), [row(output=[3], **greedy, frequency_penalty=0.3)]) == [3]
    assert sample(base.clone(), [row(output=[3, 3], **greedy, frequency_penalty=0.3)]) == [4]


def test_logit_bias_moves_a_token() -> None:
    assert sample(logits(t3=2.0, t4=1.5), [row(temperature=0.0, logit_bias={4: 1.0, 3: -0.1})]) == [4]


def test_what_an_earlier_request_said_counts_as_output() -> None:
    base = logits(t3=1.0, t4=0.5)
    for penalty in ("presence_penalty", "frequency_penalty"):
        params = SamplingParams(temperature=0.0, **{penalty: 1.0})
        for said, chosen in ((1, 4), (0, 3)):
            request = Generate(id=0, prompt=[1, 2, 3], max_tokens=9, sampling=params, said=said)
            assert sample(base.clone(), [(Sequence(request), ())]) == [chosen]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.5, "seed": 11},
        {"temperature": 0.8, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    ],
)
def test_a_row_after_drafts_is_what_it_would_be_had_they_been_said(settings: dict[str, float]) -> None:
    torch.manual_seed(0)
    said, drafts = [5, 6, 5], (7, 5, 9)
    sequence, _ = row(output=said, **settings)
    rows = list(sampled_rows([PlanEntry(sequence, len(sequence.tokens), drafts)]))
    assert [own for _, own in rows] == [(), (7,), (7, 5), drafts]
    assert sampling_of(rows).positions.tolist() == [4, 5, 6, 7]
    base = torch.randn(len(rows), VOCABULARY)
    alone = [
        sample(base[i : i + 1].clone(), [row(output=[*said, *drafts[:i]], **settings)])[0] for i in range(len(rows))
    ]
    assert sample(base, rows) == alone


def test_only_entries_that_sample_have_rows() -> None:
    sequence, _ = row(prompt=[1, 2, 3])
    sequence.pages = [0]
    assert build_step([PlanEntry(sequence, 2)]).sampling is None
    sampling = build_step([PlanEntry(sequence, 3)]).sampling
    assert sampling is not None
    assert sampling.positions.tolist() == [3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}])
def test_broken_logits_yield_no_token_and_leave_the_others_theirs(value: float, settings: dict[str, float]) -> None:
    sound = torch.randn(1, VOCABULARY)
    (alone,) = sample(sound.clone(), [row(**settings)])
    broken = torch.full((1, VOCABULARY), value)
    assert sample(torch.cat((broken, sound)), [row(**settings)] * 2) == [NON_FINITE, alone]


def test_rows_keep_their_own_settings_in_one_batch() -> None:
    base = logits(t3=0.0, t4=1.0)
    rows = [
        row(temperature=0.0),
        row(temperature=5.0, top_k=1, seed=1),
        row(temperature=0.0, logit_bias={3: 9.0}),
        row(temperature=0.0, output=[4], presence_penalty=2.0),
        row(temperature=9.0, seed=3),
    ]
    together = sample(base.repeat(len(rows), 1), rows)
    assert together == [sample(base.clone(), [one])[0] for one in rows]
    assert together[:4] == [4, 4, 3, 3]


def test_uniform_is_uniform_and_depends_on_seed_and_position() -> None:
    pairs = [(seed, position) for seed in range(60) for position in range(60)]
    seeds, positions = np.array(pairs).T
    seeds = seeds.astype(np.uint64)
    values = uniforms(seeds, positions).tolist()
    assert uniforms(seeds[70:73], positions[70:73]).tolist() == values[70:73], "whatever else is drawn"
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.02)
    assert sum(value < 0.1 for value in values) / len(values) == pytest.approx(0.1, abs=0.02)
