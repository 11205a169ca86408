"""Counts of the tokens of a sequence, and the penalties that use these counts."""

import random
from collections import Counter

import pytest
import torch

from helexa.neuron.engine.execution.step_builder_and_penalties import sampling_of
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.scheduling.ngrams_and_counts import TokenCounts
from helexa.neuron.engine.scheduling.plan import PlanEntry, allows_planning_ahead
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_output_logprobs_and_pooling import Sampled
from helexa.neuron.ops.kernel_header import NON_FINITE
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.sampling import adjusted

PENALTY = SamplingParams(temperature=0, repetition_penalty=2.0)


def sequence(prompt: list[int], sampling: SamplingParams = PENALTY) -> Sequence:
    return Sequence(Generate(id=0, prompt=prompt, max_tokens=99, sampling=sampling))


class CountingList(list[int]):
    """A list that counts how many of its items are read."""

    read = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        items = super().__getitem__(index)  # type: ignore[index]
        self.read += len(items) if isinstance(items, list) else 1
        return items


@pytest.mark.parametrize("start", [0, 5])
def test_incremental_token_counts_equal_a_recount_of_all_tokens(start: int) -> None:
    chance = random.Random(1)
    tokens = chance.choices(range(2000), k=8)
    counted = TokenCounts(tokens, start)
    for _ in range(200):
        tokens += chance.choices(range(2000), k=chance.randrange(12))
        tokens.append(-1)
        counted.distinct()
        tokens[-1] = chance.randrange(2000)
        drafts = chance.choices([*tokens[-3:], 5000, 5001], k=chance.randrange(5))
        distinct, counts = counted.with_drafts(drafts)
        assert dict(zip(distinct.tolist(), counts.tolist(), strict=True)) == Counter([*tokens[start:], *drafts])
        assert dict(zip(counted.distinct().tolist(), counted.counts().tolist(), strict=True)) == Counter(tokens[start:])


def test_token_counter_reads_each_token_of_a_growing_list_once() -> None:
    tokens = CountingList(range(1000))
    counted = TokenCounts(tokens)
    for token in range(100):
        counted.with_drafts((1, 2))
        tokens.append(token)
    assert tokens.read < 1200


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_penalties_of_a_step_read_only_the_new_tokens_of_a_long_output(name: str) -> None:
    penalized = sequence([1], SamplingParams(temperature=0, **{name: 1.5}))
    penalized.tokens = tokens = CountingList([1])
    penalized.token_counts, penalized.output_counts = TokenCounts(tokens), TokenCounts(tokens, 1)
    tokens += range(1000)
    sampling_of([(penalized, ())])
    tokens.read = 0
    for token in range(10):
        tokens.append(token)
        sampling_of([(penalized, (3, 4))])
    assert tokens.read < 50


def test_penalties_of_a_draft_row_equal_those_after_the_same_tokens_as_output() -> None:
    chance = random.Random(2)
    params = SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.3, presence_penalty=0.7)
    prompt = chance.choices(range(64), k=9)
    penalized = Sequence(Generate(id=0, prompt=prompt, max_tokens=999, sampling=params, prior_output=4))
    for _ in range(60):
        drafts = tuple(chance.choices(range(64), k=4))
        logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
        expected = logits.clone()
        for row in range(5):
            for token, count in Counter([*penalized.tokens[5:], *drafts[:row]]).items():
                expected[row, token] -= torch.tensor(0.7 + 0.3 * count, dtype=torch.float32)
        adjustments = sampling_of([(penalized, drafts[:row]) for row in range(5)]).adjustments
        assert torch.equal(adjusted(logits, adjustments, None), expected)
        penalized.tokens.append(chance.randrange(64))


@pytest.mark.parametrize(("last", "chosen"), [([5, 3], 4), ([3, 5], 3), ([3, NON_FINITE], 3)])
def test_repetition_penalty_covers_a_token_that_is_not_yet_read_from_the_device(last: list[int], chosen: int) -> None:
    penalized = sequence([1])
    penalized.tokens.append(-1)
    logits = torch.full((2, 8), -50.0)
    logits[:, 3], logits[:, 4], logits[0, 7] = 2.0, 1.5, 1.9
    sampling = sampling_of([(sequence([2]), ()), (penalized, ())])
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    assert Sampled(ops, logits, sampling, torch.tensor(last)).read() == [3, chosen]


def test_step_ahead_can_be_planned_for_a_sequence_with_a_repetition_penalty() -> None:
    decoding = sequence([1, 2])
    decoding.computed = 1
    assert allows_planning_ahead([PlanEntry(decoding, 1)])
