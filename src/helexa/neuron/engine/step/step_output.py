"""The output of one step as plain values, so that it can be sent to another process."""

from dataclasses import dataclass, field

import msgspec

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.engine.step.step_input import Float32, array_of


@dataclass(frozen=True)
class StepOutput:
    """The result of one step.

    Attributes:
        tokens: one token for each row that samples; `NON_FINITE` if the row's largest logit is NaN or infinite.
        logprobs: index in `tokens` -> log-probability, for rows that request log-probabilities.
        hidden: sequence id -> float32 [H], the sum of hidden states, for sequences that are embedded.
        scores: sequence id -> log-probabilities of the next prompt tokens, for sequences that request them.
    """

    tokens: list[int]
    logprobs: dict[int, Logprob] = field(default_factory=dict[int, Logprob])
    hidden: dict[int, Float32] = field(default_factory=dict[int, Float32])
    scores: dict[int, list[Logprob]] = field(default_factory=dict[int, list[Logprob]])


def decode_output(data: bytes) -> StepOutput:
    """Return the step output whose encoding by `step_input.encode` is `data`.

    Raises:
        msgspec.ValidationError: the bytes are not a step output.
    """
    return msgspec.msgpack.decode(data, type=StepOutput, dec_hook=array_of)
