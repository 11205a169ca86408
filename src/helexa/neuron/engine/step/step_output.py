"""What one step brings, as plain values, which can be sent to another process."""

from dataclasses import dataclass, field

import msgspec

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.engine.step.step_input import Float32, array_of


@dataclass(frozen=True)
class StepOutput:
    """The result of a step.

    Attributes:
        tokens: one for each row that samples; `NON_FINITE` where the largest logit is no finite number.
        logprobs: of those of them that are asked for, by their place in `tokens`.
        hidden: float32 [H], sums of hidden states, by the ids of the sequences that ask for them.
        scores: log-probabilities of the next prompt tokens, by the ids of the sequences that ask for them.
    """

    tokens: list[int]
    logprobs: dict[int, Logprob] = field(default_factory=dict[int, Logprob])
    hidden: dict[int, Float32] = field(default_factory=dict[int, Float32])
    scores: dict[int, list[Logprob]] = field(default_factory=dict[int, list[Logprob]])


def decode_output(data: bytes) -> StepOutput:
    """What `step_input.encode` made of an output.

    Raises:
        msgspec.ValidationError: the bytes are something else.
    """
    return msgspec.msgpack.decode(data, type=StepOutput, dec_hook=array_of)
