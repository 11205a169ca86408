"""The output of one step as plain values, so that it can be sent to another process."""

from dataclasses import dataclass, field

import msgspec

from helexa.neuron.engine.ipc.messages import Logprob
from helexa.neuron.engine.step.step_input import Float32, array_of


@dataclass(frozen=True)
class StepOutput:
    """The result of one step.

    Attributes:
        tokens: the sampled token of each row that samples; `NON_FINITE` if the row's largest logit is NaN or infinite.
        logprobs: log-probabilities of sampled tokens, by index in `tokens`, for rows that request them.
        hidden: float32 [H] (H: hidden size), the sum of hidden states, by sequence id, for embedding requests.
        scores: log-probabilities of prompt tokens that this step has computed, by sequence id, for requests that set
            `prompt_logprobs`.
    """

    tokens: list[int]
    logprobs: dict[int, Logprob] = field(default_factory=dict[int, Logprob])
    hidden: dict[int, Float32] = field(default_factory=dict[int, Float32])
    scores: dict[int, list[Logprob]] = field(default_factory=dict[int, list[Logprob]])


def decode_output(data: bytes) -> StepOutput:
    """Return the step output that `step_input.encode` has turned into the bytes `data`.

    Raises:
        msgspec.ValidationError: the bytes are not a step output.
    """
    return msgspec.msgpack.decode(data, type=StepOutput, dec_hook=array_of)
