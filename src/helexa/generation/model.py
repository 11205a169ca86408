"""A model to ask, wherever it runs: the calls of the library, each as a plain function and as a coroutine."""

import difflib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from helexa.generation.answering import Result, complete, pieces, results, several
from helexa.generation.background import Awaiting, Blocking, Caller, across, background, blocking, blocking_each
from helexa.generation.completion import Completion, Delta
from helexa.generation.errors import BatchError, GenerationError, InvalidRequestError
from helexa.generation.files.file_run import FileRun, FileSummary
from helexa.generation.files.prompt_file import read_prompts
from helexa.generation.files.result_file import ResultFile
from helexa.generation.request import Ask, Prompt, Request
from helexa.generation.sampling import Sampling, SamplingOptions
from helexa.generation.schema import AnswerSchema
from helexa.generation.target import OnProgress, Target
from helexa.generation.targets import Place

if TYPE_CHECKING:
    from pydantic import BaseModel

OnToken = Callable[[str], Awaitable[None] | None]
"""Told of each piece of an answer."""

OnResult = Callable[[int, Result], Awaitable[None] | None]
"""Told of each result of a batch, with the prompt's place."""

OnError = Literal["raise", "return"]


class AskOptions(SamplingOptions, total=False):
    """How to answer: the fields of `Sampling`, and these.

    Attributes:
        sampling: the fields together; those given beside it come first.
        system: the system prompt.
        schema: a JSON Schema or a pydantic model, which the answer is held to; see `Completion.parsed`.
        think: whether the model thinks before it answers; None leaves it to the model.
    """

    sampling: Sampling | None
    system: str | None
    schema: "Mapping[str, Any] | type[BaseModel] | None"
    think: bool | None


class BatchOptions(AskOptions, total=False):
    """How to answer many prompts.

    Attributes:
        max_parallel: prompts that are answered at once; else `HELEXA_NUM_PARALLEL`, else what suits the target.
        on_result: told of each result as it comes, plain or async; what it raises ends the batch and comes out here.
    """

    max_parallel: int | None
    on_result: OnResult | None


class Stream:
    """An answer as it comes: iterate over its pieces. To end it early, close it, or leave its `with` block.

    Attributes:
        completion: the whole of it, None before its end.
    """

    def __init__(self, pieces: AsyncGenerator[Delta | Completion, None]) -> None:
        self.completion: Completion | None = None
        self._pieces = blocking_each(pieces)

    def __iter__(self) -> Generator[Delta, None, None]:
        for piece in self._pieces:
            if isinstance(piece, Completion):
                self.completion = piece
            else:
                yield piece

    def close(self) -> None:
        """End the answer where it is generated."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream:
    """An answer as it comes, for `async for`; see `Stream`."""

    def __init__(self, pieces: AsyncGenerator[Delta | Completion, None]) -> None:
        self.completion: Completion | None = None
        self._pieces = pieces

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        async for piece in self._pieces:
            if isinstance(piece, Completion):
                self.completion = piece
            else:
                yield piece

    async def aclose(self) -> None:
        """End the answer where it is generated."""
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Model:
    """One model at one target; made by `load`. As a context manager it lets the model go in the end."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def generate(
        self, prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[AskOptions]
    ) -> Completion:
        """See `helexa.generate`."""
        return blocking(self._generate(Blocking(), prompt, n, on_token, options))

    async def agenerate(
        self, prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[AskOptions]
    ) -> Completion:
        """See `helexa.agenerate`."""
        return await self._generate(Awaiting(), prompt, n, on_token, options)

    def stream(self, prompt: Prompt, **options: Unpack[AskOptions]) -> Stream:
        """See `helexa.stream`."""
        return Stream(across(Blocking(), self._pieces(_ask(options).request(prompt))))

    def astream(self, prompt: Prompt, **options: Unpack[AskOptions]) -> AsyncStream:
        """See `helexa.astream`."""
        return AsyncStream(across(Awaiting(), self._pieces(_ask(options).request(prompt))))

    @overload
    def batch(
        self, prompts: Iterable[Prompt], *, on_error: Literal["raise"] = "raise", **options: Unpack[BatchOptions]
    ) -> list[Completion]: ...

    @overload
    def batch(
        self, prompts: Iterable[Prompt], *, on_error: Literal["return"], **options: Unpack[BatchOptions]
    ) -> list[Completion | GenerationError]: ...

    def batch(self, prompts: Iterable[Prompt], *, on_error: OnError = "raise", **options: Unpack[BatchOptions]) -> Any:
        """See `helexa.batch`."""
        return blocking(self._batch(Blocking(), prompts, on_error, options))

    @overload
    async def abatch(
        self, prompts: Iterable[Prompt], *, on_error: Literal["raise"] = "raise", **options: Unpack[BatchOptions]
    ) -> list[Completion]: ...

    @overload
    async def abatch(
        self, prompts: Iterable[Prompt], *, on_error: Literal["return"], **options: Unpack[BatchOptions]
    ) -> list[Completion | GenerationError]: ...

    async def abatch(
        self, prompts: Iterable[Prompt], *, on_error: OnError = "raise", **options: Unpack[BatchOptions]
    ) -> Any:
        """See `helexa.abatch`."""
        return await self._batch(Awaiting(), prompts, on_error, options)

    def batch_file(self, prompts: str | Path, results: str | Path, **options: Unpack[BatchOptions]) -> FileSummary:
        """See `helexa.batch_file`."""
        return blocking(self._batch_file(Blocking(), prompts, results, options))

    async def abatch_file(
        self, prompts: str | Path, results: str | Path, **options: Unpack[BatchOptions]
    ) -> FileSummary:
        """See `helexa.abatch_file`."""
        return await self._batch_file(Awaiting(), prompts, results, options)

    def open(self, on_progress: OnProgress | None = None) -> Target:
        """Have the model ready until `close`, and say where.

        Args:
            on_progress: called in another thread.

        Raises:
            HelexaError: it cannot be had.
        """
        return blocking(Blocking().wait(self._open(on_progress, self)))

    async def aopen(self, on_progress: OnProgress | None = None) -> Target:
        """See `open`."""
        return await Awaiting().wait(self._open(on_progress, self))

    def close(self) -> None:
        """Unload the model if it is in a private engine and nobody else holds it; what is asked next loads it again."""
        blocking(Blocking().wait(self._close()))

    async def aclose(self) -> None:
        """See `close`."""
        await Awaiting().wait(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _generate(
        self, caller: Caller, prompt: Prompt, n: int, on_token: OnToken | None, options: AskOptions
    ) -> Completion:
        if n < 1:
            raise InvalidRequestError(f"n is {n}, but must be 1 or more")
        defaults = _ask(options)
        requests = [defaults.request(prompt, number) for number in range(n)]
        if on_token is None:
            return await caller.wait(self._answers(requests))
        if n > 1:
            raise InvalidRequestError("on_token is for one answer: the pieces of several would run into one another")
        async with aclosing(across(caller, self._pieces(requests[0]))) as events:
            async for event in events:
                if isinstance(event, Completion):
                    return event
                if not event.thought:
                    await caller.call(on_token, event.text)
        raise AssertionError("unreachable: an answer ends with a completion or an error")

    async def _batch(
        self, caller: Caller, prompts: Iterable[Prompt], on_error: OnError, options: BatchOptions
    ) -> list[Any]:
        max_parallel, on_result = options.pop("max_parallel", None), options.pop("on_result", None)
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error is {on_error!r}, but must be 'raise' or 'return'")
        if isinstance(prompts, str | bytes | Mapping):
            raise InvalidRequestError("a batch is a list of prompts, not one; see generate")
        defaults = _ask(options)
        requests = [_request(defaults, prompt, number) for number, prompt in enumerate(prompts)]
        outcomes: list[Result | None] = [None] * len(requests)
        async with aclosing(across(caller, self.results(requests, max_parallel))) as answers:
            async for index, result in answers:
                outcomes[index] = result.at(index) if isinstance(result, GenerationError) else result
                if on_result is not None:
                    await caller.call(on_result, index, result)
                if isinstance(result, GenerationError) and on_error == "raise":
                    raise BatchError(result, outcomes) from result
        return outcomes

    async def _batch_file(
        self, caller: Caller, prompts: str | Path, results: str | Path, options: BatchOptions
    ) -> FileSummary:
        max_parallel, on_result = options.pop("max_parallel", None), options.pop("on_result", None)
        defaults, model = _ask(options), self._place.wanted_model or ""
        next(read_prompts(Path(prompts), defaults, model), None)  # prompts that are not there leave no file of results
        with ResultFile(Path(results)) as file:
            file_run = FileRun(Path(prompts), file, defaults, model)
            async with aclosing(across(caller, self.results(file_run.requests(), max_parallel))) as answers:
                async for position, result in answers:
                    index = file_run.take(position, result)
                    if on_result is not None:
                        await caller.call(on_result, index, result)
            file.put_in_order()
        return file_run.summary

    async def results(
        self, requests: Iterable[Request | GenerationError], max_parallel: int | None = None
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """What becomes of requests, which are drawn as there is room; runs in the background loop (see `across`)."""
        if max_parallel is not None and max_parallel < 1:
            raise InvalidRequestError(f"max_parallel is {max_parallel}, but must be 1 or more")
        target = await self._open()
        async with aclosing(results(target, requests, max_parallel or target.width)) as answers:
            async for item in answers:
                yield item

    async def _pieces(self, request: Request) -> AsyncGenerator[Delta | Completion, None]:
        target = await background().targets.find(self._place)
        async with aclosing(pieces(target, replace(request, streamed=True))) as events:
            async for event in events:
                yield event

    async def _answers(self, requests: list[Request]) -> Completion:
        target = await background().targets.find(self._place)
        return await (complete(target, requests[0]) if len(requests) == 1 else several(target, requests))

    async def _open(self, on_progress: OnProgress | None = None, holder: object = None) -> Target:
        target = await background().targets.find(self._place)
        await target.open(on_progress, holder)
        return target

    async def _close(self) -> None:
        await (await background().targets.find(self._place)).close(self)


_OPTIONS = AskOptions.__annotations__.keys() | SamplingOptions.__annotations__.keys() | {"model", "target", "n"}


def _ask(options: AskOptions) -> Ask:
    """The options together.

    Raises:
        TypeError: there is no such option.
        InvalidRequestError: `sampling` is something else.
    """
    settings: dict[str, Any] = dict(options)
    for name in settings:
        if name not in _OPTIONS:
            similar = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean '{similar[0]}'?" if similar else f"there are: {', '.join(sorted(_OPTIONS))}"
            raise TypeError(f"there is no option '{name}'; {hint}")
    sampling = settings.pop("sampling", None) or Sampling()
    if not isinstance(sampling, Sampling):
        raise InvalidRequestError(f"sampling is a Sampling, not {type(sampling).__name__}")
    system, schema, think = settings.pop("system", None), settings.pop("schema", None), settings.pop("think", None)
    return Ask(sampling.replaced(settings), system, AnswerSchema.of(schema), think)  # type: ignore[arg-type]


def _request(ask: Ask, prompt: Prompt, number: int) -> Request | GenerationError:
    try:
        return ask.request(prompt, number)
    except GenerationError as error:
        return error
