"""Generate the answers to a request with a loaded model: convert prompt token ids to output events."""

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from helexa.core.errors import (
    ApiError,
    context_length_exceeded,
    internal_error,
    invalid_body,
    service_unavailable,
)
from helexa.core.wire.generation import GenerationRequest
from helexa.neuron.engine.ipc.messages import SamplingParams, TokenOutput
from helexa.neuron.engine_client.token_stream import TokenStream
from helexa.neuron.events import InferenceEvent
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.requests.answer_reader import AnswerForm, AnswerReader
from helexa.neuron.requests.choices import all_choices
from helexa.neuron.requests.output_constraint import Constraint
from helexa.neuron.requests.prompt import NO_IMAGES, PromptImages
from helexa.neuron.requests.prompt_log import log_prompt
from helexa.neuron.requests.request_record import current
from helexa.neuron.requests.run_end import RunEnd

DEFAULT_TEMPERATURE = 0.7

_GATHERED = 64  # tokens per output of the engine; at most one KV page, because admission control counts the pages
_GREEDY_BELOW = 1e-3  # below this temperature, float32 logits overflow
_SEED_MASK = (1 << 63) - 1
_RETRY_AFTER_SECONDS = 2

logger = logging.getLogger(__name__)


def run(
    model: ServedModel,
    prompts: Sequence[list[int]],
    request: GenerationRequest,
    *,
    form: AnswerForm | None = None,
    constraint: Constraint | None = None,
    principal: str = "",
    turn: int = 0,
    images: PromptImages = NO_IMAGES,
    counts_prompt: bool = False,
) -> AsyncGenerator[InferenceEvent, None]:
    """Generate `request.n` answers (OpenAI: choices) to each prompt and yield their events.

    Closing the iterator cancels the generation in the engine.

    Args:
        model: the loaded model.
        prompts: token ids of each prompt; at least one prompt. Answers to the same prompt have consecutive indexes.
        request: sampling parameters and limits.
        form: rules for tool calls and reasoning; None if the whole output is plain text.
        constraint: grammars of the answer; None for unconstrained output.
        principal: name of the request's principal (API key owner); empty for anonymous requests. Principals get fair
            shares of the engine and, by default, separate prefix caches.
        turn: number of prompt tokens before the last user message of the conversation; 0 if unknown.
        images: the images of the prompt, if there is only one prompt.
        counts_prompt: whether to yield a `PromptCounted` event before the first output. Ignored for several answers.

    Raises:
        ApiError: the prompt is too long, a token id is unknown, the model is too busy, or the engine is not running.
            The error is raised only before the first event. A later failure yields a `Failed` event.
    """
    for prompt in prompts:
        log_prompt(model, prompt)
    runs = [
        partial(_run_choice, model, prompt, request, form, constraint, principal, turn, images, choice)
        for prompt in prompts
        for choice in range(request.n or 1)
    ]
    return runs[0](counts_prompt) if len(runs) == 1 else all_choices(runs, request.n or 1)


async def _run_choice(
    model: ServedModel,
    prompt: list[int],
    request: GenerationRequest,
    form: AnswerForm | None,
    constraint: Constraint | None,
    principal: str,
    turn: int,
    images: PromptImages,
    choice: int,
    counts_prompt: bool = False,
) -> AsyncGenerator[InferenceEvent, None]:
    limit = _checked_limit(model, prompt, request)
    sampling = sampling_params(request, model.text.sampling_defaults, choice)
    stop_ids: frozenset[int] = frozenset() if request.ignore_eos else model.text.tokenizer.eos_ids
    closing = model.text.output_format.end_of_reasoning(framed=constraint is not None and constraint.cut != "")
    reader = AnswerReader(
        model.text,
        prompt,
        stops=request.stop or (),
        stop_ids=stop_ids,
        form=form,
        closing_limit=limit - len(closing),
        logprobs=sampling.logprobs is not None,
        scored=request.scores_prompt,
    )
    end = RunEnd(model, len(prompt), reader, images.tokens)
    # Outputs without streaming are gathered, except if the reader may end the answer at any token.
    gather = 1 if request.stream or request.stop or not (form is None or form.runs_on) else _GATHERED

    outputs: TokenStream | None = None

    def generate() -> TokenStream:
        return model.engine.generate(
            [*prompt, *reader.written],
            max_tokens=limit - reader.tokens,
            sampling=sampling,
            stop_ids=sorted(stop_ids),
            salt=principal,
            turn=turn,
            prior_output=len(reader.written),
            grammar="" if constraint is None else constraint.cut if reader.written else constraint.grammar,
            prompt_logprobs=sampling.logprobs if request.scores_prompt else None,
            reports_start=counts_prompt,
            traced=current().span is not None,
            gather=gather,
            images=images.images,
            image_ranges=images.ranges,
        )

    try:
        async with model.admission.admit(principal, len(prompt), max(limit, 1)) as slot:
            outputs = generate()
            yield end.started()
            while True:
                async with aclosing(outputs):
                    while True:
                        output = await anext(outputs)
                        events = reader.read(output)
                        slot.hold(end.count(output))
                        if counts_prompt and output.finish != "error":
                            counts_prompt = False
                            yield end.prompt_counted()
                        if reader.stopped or reader.overthought or output.finish is not None:
                            break
                        for event in events:
                            yield event
                if not reader.overthought or output.finish == "error":
                    break
                for event in (*events, *reader.end_reasoning(closing)):
                    yield event
                end.resume()
                outputs = generate()
        # The engine has finished the request: a slow client no longer occupies the batch.
        for event in events:
            yield event
        if output.finish == "error" and not reader.stopped:
            yield end.fail(_engine_error(output))
        else:
            yield end.finish(reader.reason(output), reader.stop_string)
    except Exception as error:
        if not end.admitted:
            end.closed = True  # a rejected request, which is logged as a rejection
            raise
        if isinstance(error, ApiError):
            yield end.fail(error)
        else:
            logger.exception("run failed model=%s error=%s", model.id, type(error).__name__)
            yield end.fail(internal_error())
    finally:
        end.abandon(0 if outputs is None else outputs.unread)


def _checked_limit(model: ServedModel, prompt: list[int], request: GenerationRequest) -> int:
    """Check that the model can serve the request now, and return the maximum number of output tokens for `prompt`.

    Raises:
        ApiError: the model cannot serve requests now, the prompt is empty or too long, or a token id is unknown.
    """
    model.require_servable()
    limit = output_limit(prompt, request.output_limit, model.context_length, model.default_output)
    request.check_logprobs(len(prompt), limit)
    vocab_size = model.engine.ready.vocab_size
    request.check_vocabulary(vocab_size)
    if (largest := max(prompt)) >= vocab_size:  # some tokenizers have added tokens without an embedding in the model
        token = model.text.tokenizer.token_text(largest)
        raise invalid_body(f"the prompt contains the token {token!r}, which is not in the model's vocabulary")
    return limit


def output_limit(prompt: list[int], requested: int | None, context_length: int, default: int = 0) -> int:
    """Return the maximum number of output tokens: `requested`, else `default`, but not more than the context allows.

    Args:
        prompt: token ids of the prompt.
        requested: output limit in the request; None if the request sets no limit.
        context_length: maximum number of tokens of prompt and output together.
        default: output limit if the request sets none; 0 for all tokens of the context after the prompt.

    Raises:
        ApiError: the prompt is empty, or is so long that the context has no space for output.
    """
    if not prompt:
        raise invalid_body("the prompt has no tokens")
    free = context_length - len(prompt)
    if free < 0 or (free == 0 and requested != 0):
        raise context_length_exceeded(len(prompt), context_length)
    return min((default or free) if requested is None else requested, free)


def sampling_params(request: GenerationRequest, defaults: Mapping[str, float], choice: int = 0) -> SamplingParams:
    """Return the sampling parameters for one answer.

    Each parameter is the request's value if set, else the model's default, else helexa's default.

    Args:
        request: the client's request.
        defaults: default sampling parameters of the model.
        choice: index of the answer. It is added to the request's seed, because several answers must differ.
    """

    def resolve(name: str, fallback: float, low: float, high: float) -> float:
        requested: float | None = getattr(request, name)
        value = defaults.get(name, fallback) if requested is None else requested
        return min(max(value, low), high)  # requests are validated, but a model's file may hold any value

    temperature = resolve("temperature", DEFAULT_TEMPERATURE, 0.0, 2.0)
    return SamplingParams(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=resolve("top_p", 1.0, 1e-6, 1.0),
        top_k=int(resolve("top_k", 0, 0, 1_000_000)),
        min_p=resolve("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=resolve("repetition_penalty", 1.0, 0.01, 100.0),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        seed=secrets.randbits(63) if request.seed is None else (request.seed + choice) & _SEED_MASK,
        logit_bias=request.logit_bias or {},
        logprobs=request.alternatives,
    )


def _engine_error(output: TokenOutput) -> ApiError:
    message = output.error or "the model's engine failed"
    if output.bad_grammar:
        return ApiError(400, "invalid_grammar", message)
    return service_unavailable(message, _RETRY_AFTER_SECONDS) if output.retry else internal_error(message)
