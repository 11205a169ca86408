"""Sampling parameters of a request, and the check that its prompt is short enough."""

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from helexa.core.errors import context_length_exceeded, invalid_body
from helexa.core.sampling import BOUNDS
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel

if TYPE_CHECKING:  # these modules import pydantic, which is slow, and which private engines rarely need
    from helexa.core.wire.request import GenerationRequest
    from helexa.neuron.requests.text_chat import TextChat

DEFAULT_TEMPERATURE = 0.7

_GREEDY_BELOW = 1e-3  # lower temperatures mean greedy sampling, because logits divided by them may overflow float32
_LEAST_TOP_P = 1e-6  # replaces smaller values, such as 0, with the same effect: only the most likely token remains
_FALLBACKS = msgspec.structs.asdict(SamplingParams(temperature=DEFAULT_TEMPERATURE))
_SEED_MASK = (1 << 63) - 1


def checked_limit(model: ServedModel, prompt: list[int], request: "GenerationRequest | TextChat") -> int:
    """Return a request's output limit in tokens; raise `ApiError` if unservable."""
    model.require_servable()
    limit = output_limit(prompt, request.output_limit, model.context_length, model.default_output)
    limit = request.limited_by_logprobs(len(prompt), limit)
    vocab_size = model.engine.ready.vocab_size
    request.check_vocabulary(vocab_size)
    if (largest := max(prompt)) >= vocab_size:  # some tokenizers have added tokens without an embedding in the model
        token = model.text.tokenizer.token_text(largest)
        raise invalid_body(
            f"the prompt contains the token {token!r}, which is not in the model's vocabulary; remove this token"
        )
    return limit


def output_limit(prompt: list[int], requested: int | None, context_length: int, default: int = 0) -> int:
    """Return the output limit: `requested` or `default`, within the context.

    Args:
        default: output limit if the request sets none; 0 for all tokens of the context after the prompt.

    Raises:
        ApiError: the prompt is empty, or is so long that the context has no space for output.
    """
    if not prompt:
        raise invalid_body("the prompt has no tokens; send some text")
    free = context_length - len(prompt)
    if free < 0 or (free == 0 and requested != 0):
        raise context_length_exceeded(len(prompt), context_length)
    return min((default or free) if requested is None else requested, free)


def sampling_params(
    request: "GenerationRequest | TextChat", defaults: Mapping[str, float], choice: int = 0
) -> SamplingParams:
    """Return the sampling parameters for one answer.

    Each parameter is the request's value if set, else the model's default, else helexa's default. Models have no
    defaults for the frequency and presence penalties.

    Args:
        choice: index of the answer. It is added to the request's seed, because several answers must differ.
    """

    def resolve(name: str) -> float:
        requested: float | None = getattr(request, name)
        value = defaults.get(name, _FALLBACKS[name]) if requested is None else requested
        return BOUNDS[name].nearest(value)  # requests are validated, but a model's file may hold any value

    temperature = resolve("temperature")
    return SamplingParams(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=max(resolve("top_p"), _LEAST_TOP_P),
        top_k=max(int(resolve("top_k")), 0),  # -1 is vLLM's spelling of "off"
        min_p=resolve("min_p"),
        repetition_penalty=resolve("repetition_penalty"),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        seed=secrets.randbits(63) if request.fixed_seed is None else (request.fixed_seed + choice) & _SEED_MASK,
        logit_bias=request.logit_bias or {},
        logprobs=request.alternatives,
    )
