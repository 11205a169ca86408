"""Generate the answers to a request: token ids in, output events out."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from helexa.core.errors import ApiError, internal_error, service_unavailable
from helexa.core.logs import quoted
from helexa.neuron.engine.ipc.messages import TokenOutput
from helexa.neuron.engine_client.token_stream import TokenStream
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import ChoiceEvent, Failed, Finished, InferenceEvent, PromptCounted, Started
from helexa.neuron.requests.answer_reader import AnswerForm, AnswerReader
from helexa.neuron.requests.output_constraint import Constraint, chat_constraint, schemas_of
from helexa.neuron.requests.prompt_images_and_thinking import (
    NO_IMAGES,
    PartAt,
    PromptImages,
    cache_miss,
    chat_prompt,
    log_prompt,
)
from helexa.neuron.requests.request_and_run_records import RunRecorder, current
from helexa.neuron.requests.sampling_and_context_limit import checked_limit, sampling_params

if TYPE_CHECKING:  # these modules import pydantic, which is slow, and which private engines rarely need
    from helexa.core.wire.openai_chat import ChatRequest
    from helexa.core.wire.request import GenerationRequest
    from helexa.neuron.requests.text_chat import TextChat

# Number of unread tokens at which the reader of an answer wakes, unless each token must be read at once. The number is
# at most one KV page, because admission control counts the pages of a request when the reader wakes.
_WAKE_TOKENS = 64
_RETRY_AFTER_SECONDS = 2

logger = logging.getLogger(__name__)

Run = AsyncGenerator[InferenceEvent, None]

_MOST_BUFFERED = 4  # maximum number of events, per run of a request, that wait for a slow client
_MOST_ACTIVE = 16  # largest number of concurrent runs of one request


async def converse(
    model: ServedModel,
    chat: "ChatRequest | TextChat",
    principal: str,
    *,
    thinks: bool | None = None,
    spelled_thoughts: bool = False,
    counts_prompt: bool = False,
) -> AsyncGenerator[InferenceEvent, None]:
    """Return an iterator over the output events of a conversation's answers.

    The events are independent of the API format. `run` describes the iterator and its errors.

    Args:
        thinks: whether the model reasons if the request does not set this; None to use the chat template's default.
        spelled_thoughts: whether to report reasoning as part of the answer's text.
        counts_prompt: whether to yield a `PromptCounted` event before the first output.

    Raises:
        ApiError: the conversation is too long, an image of the conversation cannot be used, the chat template cannot
            render the conversation, or the node does not support the structure that the request demands for the output.
    """
    model.expect_request()
    tools = chat.offered_tools
    prompt = await chat_prompt(model, chat, thinks=thinks)
    may_reason = chat.thinks(thinks) is not False
    constraint = await chat_constraint(model, chat, tools, prompt.tokens, may_reason)
    form = AnswerForm(
        schemas_of(tools),
        parallel=chat.parallel_tool_calls is not False,
        must_call=chat.must_call,
        spelled_thoughts=spelled_thoughts,
        thinking_budget=chat.max_reasoning_tokens,
        untagged_calls=chat.shape is None and not chat.must_call,
        structured=chat.shape is not None,
        may_reason=may_reason,
    )
    return run(
        model,
        [prompt.tokens],
        chat,
        form=form,
        constraint=constraint,
        principal=principal,
        turn=prompt.turn,
        images=prompt.images,
        part_at=prompt.part_at,
        counts_prompt=counts_prompt,
    )


def run(
    model: ServedModel,
    prompts: Sequence[list[int]],
    request: "GenerationRequest | TextChat",
    *,
    form: AnswerForm | None = None,
    constraint: Constraint | None = None,
    principal: str = "",
    turn: int = 0,
    images: PromptImages = NO_IMAGES,
    part_at: PartAt | None = None,
    counts_prompt: bool = False,
) -> AsyncGenerator[InferenceEvent, None]:
    """Generate `request.n` answers (choices) to each prompt; yield events.

    If there are several answers, `ChoiceEvent` wraps the output and `Finished` events of each answer, and a last
    `Finished` event has the sums. Closing the iterator cancels the generation in the engine.

    Args:
        prompts: token ids of each prompt; at least one prompt. Answers to the same prompt have consecutive indexes.
        form: rules for tool calls and reasoning; None if the whole output is plain text.
        principal: name of the request's principal (API key owner); empty for anonymous requests. Principals get fair
            shares of the engine and, by default, separate prefix caches.
        turn: number of prompt tokens before the last user message of the conversation; 0 if unknown.
        images: the images of the prompt, if there is only one prompt.
        part_at: function that returns the message to which a token of the prompt belongs; None for a prompt without
            messages.
        counts_prompt: whether to yield a `PromptCounted` event before the first output. Ignored for several answers.

    Raises:
        ApiError: the prompt is too long, a token id is unknown, the model is too busy, or the engine is not running.
            The error is raised only before the first event. A later failure yields a `Failed` event.
    """
    for prompt in prompts:
        log_prompt(model, prompt)
    runs = [
        partial(_run_choice, model, prompt, request, form, constraint, principal, turn, images, part_at, (nth, choice))
        for nth, prompt in enumerate(prompts)
        for choice in range(request.n or 1)
    ]
    return runs[0](counts_prompt) if len(runs) == 1 else _all_choices(runs, request.n or 1)


async def _run_choice(
    model: ServedModel,
    prompt: list[int],
    request: "GenerationRequest | TextChat",
    form: AnswerForm | None,
    constraint: Constraint | None,
    principal: str,
    turn: int,
    images: PromptImages,
    part_at: PartAt | None,
    position: tuple[int, int],
    counts_prompt: bool = False,
) -> AsyncGenerator[InferenceEvent, None]:
    await model.wake()
    limit = checked_limit(model, prompt, request)
    sampling = sampling_params(request, model.text.sampling_defaults, position[1])
    stop_ids: frozenset[int] = frozenset() if request.ignore_eos else model.text.tokenizer.eos_ids
    closing = model.text.output_format.end_of_reasoning(
        framed=constraint is not None and constraint.after_reasoning != ""
    )
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
    recorder = RunRecorder(model, len(prompt), reader, images.tokens, position)
    # Number of unread tokens at which this task wakes. It is 1 for a stream, and also if `reader` may end the answer
    # earlier than the engine.
    wake_at = 1 if request.stream or request.stop or not (form is None or form.runs_on) else _WAKE_TOKENS

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
            grammar="" if constraint is None else constraint.after_reasoning if reader.written else constraint.grammar,
            prompt_logprobs=sampling.logprobs if request.scores_prompt else None,
            reports_start=counts_prompt,
            traced=current().span is not None,
            prefix_key=current().prefix_key,
            wake_at=wake_at,
            images=images.images,
            image_ranges=images.ranges,
        )

    try:
        async with model.admission.admit(principal, len(prompt), max(limit, 1)) as admitted:
            outputs = first = generate()
            yield recorder.started()
            # The loop body runs once, and again each time the server closes reasoning that exceeds its budget.
            while True:
                async with aclosing(outputs):
                    while True:
                        output = await anext(outputs)
                        events = reader.read(output)
                        admitted.hold(recorder.count(output))
                        if counts_prompt and output.finish != "error":
                            counts_prompt = False
                            yield recorder.prompt_counted()
                        if reader.stopped or reader.over_budget or output.finish is not None:
                            break
                        for event in events:
                            yield event
                if not reader.over_budget or output.finish == "error":
                    break
                # The engine cannot insert tokens into a running sequence. A new sequence continues with the closing
                # tokens as part of its prompt, whose KV pages are found in the prefix cache.
                for event in (*events, *reader.end_reasoning(closing)):
                    yield event
                recorder.resume()
                outputs = generate()
        # The last events are sent after the end of the admission, so that a slow client does not occupy a slot of the
        # batch.
        for event in events:
            yield event
        if output.finish == "error" and not reader.stopped:
            yield recorder.fail(_engine_error(output))
        else:
            miss = first.miss and await model.text.run(cache_miss, model, prompt, first.miss, part_at)
            yield recorder.finish(reader.reason(output), reader.stop_string, miss)
    except Exception as error:
        if not recorder.admitted:
            recorder.closed = True  # nothing to record: the code that sends the error response logs the rejection
            raise
        if isinstance(error, ApiError):
            yield recorder.fail(error)
        else:
            logger.exception(
                "request failed with an internal error model=%s error=%s", quoted(model.id), type(error).__name__
            )
            yield recorder.fail(internal_error())
    finally:
        recorder.abandon(0 if outputs is None else outputs.unread)


def _engine_error(output: TokenOutput) -> ApiError:
    message = output.error or "the model's engine failed"
    if output.bad_grammar:
        return ApiError(400, "invalid_grammar", message)
    return service_unavailable(message, _RETRY_AFTER_SECONDS) if output.retry else internal_error(message)


async def _all_choices(runs: Sequence[Callable[[], Run]], per_prompt: int) -> AsyncGenerator[InferenceEvent, None]:
    """Run all answers of a request; yield each event with the index of its answer.

    If one run fails, a `Failed` event ends the stream. Otherwise the last event contains the sums of the token counts,
    in which each prompt counts once. Closing the iterator cancels all runs.

    Args:
        runs: functions that each start the run of one answer. If admission control rejects a run while other runs are
            active, the run is started again later.
        per_prompt: number of consecutive runs that have the same prompt.

    Raises:
        ApiError: the first run was rejected. The error is raised before the first event.
    """
    events: asyncio.Queue[tuple[int, InferenceEvent]] = asyncio.Queue(_MOST_BUFFERED * len(runs))
    tasks: list[asyncio.Task[None]] = []
    ends: dict[int, Finished] = {}
    active = _ActiveRuns()
    first = runs[0]()
    try:
        yield await anext(first)
        active.count += 1
        tasks.append(asyncio.create_task(_pump(0, first, events, active)))
        while len(ends) < len(runs):
            index, event = await events.get()
            if isinstance(event, Failed):
                yield event
                return
            if isinstance(event, Finished):
                ends[index] = event
            if not isinstance(event, Started | PromptCounted | ChoiceEvent):
                yield ChoiceEvent(index, event)
            # The other runs start after the first event of the first run. At that time, its prefill has ended, so the
            # other runs find the prompt in the prefix cache.
            if len(tasks) == 1:
                later = [_begin(place, run, events, active) for place, run in enumerate(runs) if place]
                tasks += map(asyncio.create_task, later)
        yield _total([ends[index] for index in range(len(runs))], per_prompt)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await first.aclose()


class _ActiveRuns:
    """Counts the active runs of one request; a run generates one answer."""

    def __init__(self) -> None:
        self.count = 0
        # Event that is set when one of the active runs ends. A new event then replaces it.
        self.ended = asyncio.Event()

    def leave(self) -> None:
        """Record that a run has ended, and wake the tasks that wait for `ended`."""
        self.count -= 1
        self.ended.set()
        self.ended = asyncio.Event()


Events = asyncio.Queue[tuple[int, InferenceEvent]]


async def _begin(index: int, begin: Callable[[], Run], events: Events, active: _ActiveRuns) -> None:
    """Start a run when fewer than `_MOST_ACTIVE` run; forward its events to `events`.

    A run that admission control rejects is started again when another run of the request has ended.
    """
    while True:
        while active.count >= _MOST_ACTIVE:
            await active.ended.wait()
        active.count += 1
        async with aclosing(begin()) as run:
            run_ended = active.ended
            try:
                event = await anext(run)
            except Exception as error:
                active.count -= 1
                # A retry may succeed only if other runs of this request occupy slots, or have just left them.
                has_others = active.count or run_ended.is_set()
                if not (has_others and isinstance(error, ApiError) and error.retry_after is not None):
                    await events.put((index, _failed(error)))
                    return
            else:
                await events.put((index, event))
                await _pump(index, run, events, active)
                return
        await run_ended.wait()


async def _pump(index: int, run: Run, events: Events, active: _ActiveRuns) -> None:
    """Forward the events of the active run `run` to `events` until its end."""
    try:
        async for event in run:
            await events.put((index, event))
    except Exception as error:
        await events.put((index, _failed(error)))
    finally:
        active.leave()


def _failed(error: Exception) -> Failed:
    if isinstance(error, ApiError):
        return Failed(error.with_traceback(None))
    logger.exception("request failed with an internal error error=%s", type(error).__name__)
    return Failed(internal_error())


def _total(ends: Sequence[Finished], per_prompt: int) -> Finished:
    firsts = ends[::per_prompt]
    return msgspec.structs.replace(
        ends[0],
        prompt_tokens=sum(end.prompt_tokens for end in firsts),
        cached_tokens=sum(end.cached_tokens for end in firsts),
        image_tokens=sum(end.image_tokens for end in firsts),
        completion_tokens=sum(end.completion_tokens for end in ends),
        reasoning_tokens=sum(end.reasoning_tokens for end in ends),
        decode_ms=max(end.decode_ms for end in ends),
    )
