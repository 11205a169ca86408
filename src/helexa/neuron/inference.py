"""One request on one model: token ids in, events out, and one place where every run ends."""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Literal

from helexa.core.errors import (
    ApiError,
    context_length_exceeded,
    internal_error,
    invalid_body,
    service_unavailable,
)
from helexa.core.logs import tell
from helexa.core.wire.generation import GenerationRequest
from helexa.neuron.engine.messages import SamplingParams, Timing, TokenOutput
from helexa.neuron.events import Failed, Finished, InferenceEvent, Started, TextDelta
from helexa.neuron.exchange import RunRecord, current
from helexa.neuron.model import ServedModel
from helexa.neuron.text.detokenizer import Detokenizer
from helexa.neuron.text.stop_strings import StopStrings

DEFAULT_TEMPERATURE = 0.7
DEFAULT_OUTPUT_TOKENS = 8192

_GREEDY_BELOW = 1e-3  # colder than this, float32 logits overflow before they tell tokens apart
_SEED_MASK = (1 << 63) - 1
_RETRY_AFTER_SECONDS = 2

logger = logging.getLogger(__name__)


async def run(
    model: ServedModel, prompt: list[int], request: GenerationRequest, *, principal: str = "", turn: int = 0
) -> AsyncGenerator[InferenceEvent, None]:
    """Answer `prompt`; closing the iterator cancels the run in the engine.

    Args:
        principal: who asks, as one word, empty for anonymous callers. They take turns, and what is cached of the prompt
            is shared with requests of the same principal only.
        turn: leading tokens of the prompt that stay when its last turn is said anew, or 0 if that is not known.

    Raises:
        ApiError: before the first event only: the prompt does not fit, a token id is unknown, the model is too busy,
            or the engine is down. Later failures are a `Failed` event.
    """
    model.require_servable()
    limit = output_limit(prompt, request.output_limit, model.context_length)
    vocab_size = model.engine.ready.vocab_size
    request.check_vocabulary(vocab_size)
    if (largest := max(prompt)) >= vocab_size:  # some tokenizers have added tokens that the model was never given
        token = model.text.tokenizer.token_text(largest)
        raise invalid_body(f"the prompt has the token {token!r}, which the model does not have")
    sampling = sampling_params(request, model.text.sampling_defaults)
    stop_ids: frozenset[int] = frozenset() if request.ignore_eos else model.text.tokenizer.eos_ids
    reader = _Reader(Detokenizer(model.text.tokenizer), StopStrings(request.stop or ()), stop_ids)
    end = _End(model, len(prompt))
    try:
        async with model.admission.seat(principal, len(prompt), limit) as seat:
            outputs = model.engine.generate(
                prompt, max_tokens=limit, sampling=sampling, stop_ids=sorted(stop_ids), salt=principal, turn=turn
            )
            yield end.started()
            async with aclosing(outputs):
                while True:
                    output = await anext(outputs)
                    seat.hold(end.count(output))
                    text, stopped = reader.read(output)
                    if stopped or output.finish is not None:
                        break
                    if text:
                        yield TextDelta(text)
        # The engine is done with the request by now, however slowly the rest is read.
        if text:
            yield TextDelta(text)
        if output.finish == "error" and not stopped:
            yield end.fail(_engine_error(output))
        else:
            yield end.finish("length" if output.finish == "length" and not stopped else "stop", reader.stop_string)
    except Exception as error:
        if not end.admitted:
            end.closed = True  # a refusal, which is logged as one
            raise
        logger.exception("run failed model=%s error=%s", model.id, type(error).__name__)
        yield end.fail(internal_error())
    finally:
        end.abandon()


def output_limit(prompt: list[int], requested: int | None, context_length: int) -> int:
    """How many tokens the answer may have: what was asked for or the default, as far as the context has room.

    Raises:
        ApiError: the prompt is empty, or leaves no room in the context.
    """
    if not prompt:
        raise invalid_body("the prompt has no tokens")
    room = context_length - len(prompt)
    if room <= 0:
        raise context_length_exceeded(len(prompt), context_length)
    return min(requested or DEFAULT_OUTPUT_TOKENS, room)


def sampling_params(request: GenerationRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """Resolve each parameter: the request's value, else the model's own (`defaults`), else helexa's."""

    def resolve(name: str, fallback: float, low: float, high: float) -> float:
        asked: float | None = getattr(request, name)
        value = defaults.get(name, fallback) if asked is None else asked
        return min(max(value, low), high)  # a request was checked already, a model's file was not

    temperature = resolve("temperature", DEFAULT_TEMPERATURE, 0.0, 2.0)
    return SamplingParams(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=resolve("top_p", 1.0, 1e-6, 1.0),
        top_k=int(resolve("top_k", 0, 0, 1_000_000)),
        min_p=resolve("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=resolve("repetition_penalty", 1.0, 0.01, 100.0),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        seed=secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK,
        logit_bias=request.logit_bias or {},
    )


def _engine_error(output: TokenOutput) -> ApiError:
    message = output.error or "the model's engine failed"
    return service_unavailable(message, _RETRY_AFTER_SECONDS) if output.retry else internal_error(message)


class _Reader:
    """Reads the text out of a sequence's outputs."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, stop_ids: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def read(self, output: TokenOutput) -> tuple[str, bool]:
        """The text that can be shown by now, and whether a stop string ended it."""
        tokens = output.tokens
        if output.finish == "stop" and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]
        text = self._detokenizer.push(tokens)
        if output.finish is not None:
            text += self._detokenizer.flush()
        text, stopped = self._stops.push(text)
        if output.finish is not None and not stopped:
            text += self._stops.flush()
        return text, stopped


class _End:
    """The one way out of a run: the last event, the accounting and the completion log line, once, on every path."""

    def __init__(self, model: ServedModel, prompt_tokens: int) -> None:
        self.closed = False
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._timing: Timing | None = None
        self._begin = time.perf_counter()
        self._entered: float | None = None
        self._first_token: float | None = None

    @property
    def admitted(self) -> bool:
        return self._entered is not None

    def started(self) -> Started:
        self._entered = time.perf_counter()
        return Started(self._prompt_tokens)

    def count(self, output: TokenOutput) -> int:
        """Take note of an output; how many tokens of prompt and answer the engine holds now."""
        if output.tokens and self._first_token is None:
            self._first_token = time.perf_counter()
        self._completion_tokens += len(output.tokens)
        self._cached_tokens += output.cached_tokens
        self._timing = output.timing or self._timing
        return self._prompt_tokens + self._completion_tokens if self._first_token is not None else 0

    def finish(self, reason: Literal["stop", "length"], stop_string: str | None) -> Finished:
        timing = self._close(reason)
        return Finished(
            reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            prefill_ms=timing.prefill_ms,
            decode_ms=timing.decode_ms,
            stop_string=stop_string,
        )

    def fail(self, error: ApiError) -> Failed:
        self._close("error")
        return Failed(error)

    def abandon(self) -> None:
        """The end of a run that nobody reads any more; does nothing after `finish` or `fail`."""
        if not self.closed:
            self._close("cancelled", client_gone=True)

    def _close(self, reason: str, client_gone: bool = False) -> Timing:
        self.closed = True
        timing = self._timing or self._measured()
        if self._first_token is not None:
            # As seen from here, a wait in the engine looks like prefill.
            prefilled = self._prompt_tokens - self._cached_tokens if self._timing is not None else 0
            self._model.record(timing, prefilled, self._completion_tokens)
        first_token = None if self._first_token is None else self._first_token - self._begin
        waited = 0.0 if self._entered is None else self._entered - self._begin
        run = RunRecord(
            model=self._model.id,
            reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            queue=waited + timing.queue_ms / 1000,
            prefill=timing.prefill_ms / 1000,
            decode=timing.decode_ms / 1000,
            first_token=first_token,
        )
        current().run = run
        tell(
            logger,
            logging.INFO,
            "completed",
            model=run.model,
            prompt_tokens=run.prompt_tokens,
            completion_tokens=run.completion_tokens,
            cached_tokens=run.cached_tokens,
            finish_reason=reason,
            queue_ms=round(run.queue * 1000),
            ttft_ms=None if first_token is None else round(first_token * 1000),
            prefill_ms=round(timing.prefill_ms),
            decode_ms=round(timing.decode_ms),
            client_gone=client_gone,
        )
        return timing

    def _measured(self) -> Timing:
        """The timing as seen from here, for runs that ended before the engine reported its own."""
        now = time.perf_counter()
        if self._entered is None:
            return Timing(queue_ms=(now - self._begin) * 1000, prefill_ms=0.0, decode_ms=0.0)
        first = self._first_token or now
        return Timing(queue_ms=0.0, prefill_ms=(first - self._entered) * 1000, decode_ms=(now - first) * 1000)
