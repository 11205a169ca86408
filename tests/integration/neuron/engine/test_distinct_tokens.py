"""The set of distinct tokens of a sequence, and the repetition penalty on it."""

import random

import pytest
import torch

from helexa.neuron.engine.execution.step_builder import sampling_of
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.sampling.step_sampler import launch
from helexa.neuron.engine.scheduling.distinct_tokens import DistinctTokens
from helexa.neuron.engine.scheduling.overlap import foreseeable
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.constants import NON_FINITE
from helexa.neuron.ops.reference.reference import ReferenceOps

PENALTY = SamplingParams(temperature=0, repetition_penalty=2.0)


def sequence(prompt: list[int]) -> Sequence:
    return Sequence(Generate(id=0, prompt=prompt, max_tokens=99, sampling=PENALTY))


def test_distinct_tokens_equal_the_set_of_a_growing_list() -> None:
    chance = random.Random(1)
    tokens: list[int] = []
    distinct = DistinctTokens(tokens)
    for _ in range(200):
        tokens += chance.choices(range(2000), k=chance.randrange(12))
        tokens.append(-1)
        distinct.array()
        tokens[-1] = chance.randrange(2000)
        assert sorted(distinct.array().tolist()) == sorted(set(tokens))


def test_each_token_is_read_once() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            items = super().__getitem__(index)  # type: ignore[index]
            self.read += len(items) if isinstance(items, list) else 1
            return items

    tokens = Counting(range(1000))
    distinct = DistinctTokens(tokens)
    for token in range(100):
        distinct.array()
        tokens.append(token)
    assert tokens.read < 1200


@pytest.mark.parametrize(("last", "chosen"), [([5, 3], 4), ([3, 5], 3), ([3, NON_FINITE], 3)])
def test_penalty_covers_a_token_still_on_the_device(last: list[int], chosen: int) -> None:
    penalized = sequence([1])
    penalized.tokens.append(-1)
    logits = torch.full((2, 8), -50.0)
    logits[:, 3], logits[:, 4], logits[0, 7] = 2.0, 1.5, 1.9
    sampling = sampling_of([(sequence([2]), ()), (penalized, ())])
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    assert launch(ops, logits, sampling, torch.tensor(last)).read() == [3, chosen]


def test_repetition_penalty_allows_overlap() -> None:
    decoding = sequence([1, 2])
    decoding.computed = 1
    assert foreseeable([PlanEntry(decoding, 1)])
