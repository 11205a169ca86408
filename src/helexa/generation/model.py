"""`Model`: a model on a server or in a private engine.

Most methods exist as a plain and as an async method.
"""

import difflib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

from helexa.core.sampling import Sampling, SamplingOptions
from helexa.generation.background_event_loop import (
    AsyncCaller,
    BlockingCaller,
    Caller,
    across,
    background,
    blocking,
    blocking_each,
)
from helexa.generation.batch_file import FileRun, FileSummary, ResultFile, read_prompts
from helexa.generation.completion import Completion, Delta
from helexa.generation.errors import BatchError, GenerationError, InvalidRequestError
from helexa.generation.options import AskOptions, BatchOptions
from helexa.generation.request import AnswerSchema, Ask, Prompt, Request, alternatives, image_part
from helexa.generation.run_requests import Result, complete, complete_choices, pieces, results
from helexa.generation.target import OnProgress, Target
from helexa.generation.target_choice import ModelLocation
from helexa.generation.tools import chosen_tool, tool_definitions

OnToken = Callable[[str], Awaitable[None] | None]
"""Called with each chunk of a response's text. Reasoning is not passed."""

OnError = Literal["raise", "return"]


class Stream:
    """The chunks of a streamed response, for one `for` loop.

    To cancel the request before the end, call `close` or leave the `with` block.

    Attributes:
        completion: the complete response. None before the end, and if the request failed or was canceled.
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
        """Cancel the request if the response has not ended."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream:
    """The chunks of a streamed response, for one `async for` loop.

    To cancel the request before the end, call `aclose` or leave the `async with` block.

    Attributes:
        completion: the complete response. None before the end, and if the request failed or was canceled.
    """

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
        """Cancel the request if the response has not ended."""
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Model:
    """One model on a server or in a private engine, returned by `load`.

    Leaving its `with` block calls `close`.
    """

    def __init__(self, location: ModelLocation) -> None:
        self._location = location

    def generate(
        self, prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[AskOptions]
    ) -> Completion:
        """Generate a response to a prompt with this model; see `helexa.generate`."""
        return blocking(self._generate(BlockingCaller(), prompt, n, on_token, options))

    async def agenerate(
        self, prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[AskOptions]
    ) -> Completion:
        """Generate a response to a prompt: the async version of `generate`."""
        return await self._generate(AsyncCaller(), prompt, n, on_token, options)

    def stream(self, prompt: Prompt, **options: Unpack[AskOptions]) -> Stream:
        """Return the chunks of a response as they are generated; see `helexa.stream`."""
        return Stream(across(BlockingCaller(), self._pieces(_ask(options).request(prompt))))

    def astream(self, prompt: Prompt, **options: Unpack[AskOptions]) -> AsyncStream:
        """Return the chunks of a response, for `async for`; see `helexa.astream`."""
        return AsyncStream(across(AsyncCaller(), self._pieces(_ask(options).request(prompt))))

    @overload
    def batch(
        self, prompts: Iterable[Prompt], *, on_error: Literal["raise"] = "raise", **options: Unpack[BatchOptions]
    ) -> list[Completion]: ...

    @overload
    def batch(
        self, prompts: Iterable[Prompt], *, on_error: Literal["return"], **options: Unpack[BatchOptions]
    ) -> list[Completion | GenerationError]: ...

    def batch(self, prompts: Iterable[Prompt], *, on_error: OnError = "raise", **options: Unpack[BatchOptions]) -> Any:
        """Generate responses to many prompts with this model; see `helexa.batch`."""
        return blocking(self._batch(BlockingCaller(), prompts, on_error, options))

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
        """Generate responses to many prompts: the async version of `batch`."""
        return await self._batch(AsyncCaller(), prompts, on_error, options)

    def batch_file(self, prompts: str | Path, results: str | Path, **options: Unpack[BatchOptions]) -> FileSummary:
        """Generate responses to the prompts in a file; see `helexa.batch_file`."""
        return blocking(self._batch_file(BlockingCaller(), prompts, results, options))

    async def abatch_file(
        self, prompts: str | Path, results: str | Path, **options: Unpack[BatchOptions]
    ) -> FileSummary:
        """Generate responses to the prompts in a file: the async `batch_file`."""
        return await self._batch_file(AsyncCaller(), prompts, results, options)

    @overload
    def embed(self, texts: str) -> list[float]: ...  # type: ignore[overload-overlap]

    @overload
    def embed(self, texts: Iterable[str]) -> list[list[float]]: ...

    def embed(self, texts: str | Iterable[str]) -> Any:
        """Return the embeddings of texts with this model; see `helexa.embed`."""
        return blocking(BlockingCaller().wait(self._embed(texts)))

    @overload
    async def aembed(self, texts: str) -> list[float]: ...

    @overload
    async def aembed(self, texts: Iterable[str]) -> list[list[float]]: ...

    async def aembed(self, texts: str | Iterable[str]) -> Any:
        """Return the embeddings of texts: the async version of `embed`."""
        return await AsyncCaller().wait(self._embed(texts))

    def open(self, on_progress: OnProgress | None = None) -> Target:
        """Load the model, and return the server or the private engine that runs it.

        In a private engine, the model stays loaded until `close` is called. A server is not asked to load the model.
        The async methods of the returned object must run in the background event loop.

        Args:
            on_progress: called with the progress of the load, in another thread; see `OnProgress`.

        Raises:
            HelexaError: the model could not be downloaded or loaded.
        """
        return blocking(BlockingCaller().wait(self._open(on_progress, self)))

    async def aopen(self, on_progress: OnProgress | None = None) -> Target:
        """Load the model, and return the server or engine: the async version of `open`."""
        return await AsyncCaller().wait(self._open(on_progress, self))

    def close(self) -> None:
        """Unload the model, unless another object from `load` still uses it.

        The next request loads the model again. If the model is on a server, do nothing.
        """
        blocking(BlockingCaller().wait(self._close()))

    async def aclose(self) -> None:
        """Unload the model from its private engine: the async version of `close`."""
        await AsyncCaller().wait(self._close())

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
        ask = _ask(options)
        requests = [ask.request(prompt, number) for number in range(n)]
        if on_token is None:
            return await caller.wait(self._complete(requests))
        if n > 1:
            raise InvalidRequestError(
                f"on_token requires n=1, but n is {n}, and pieces of several answers would be mixed; leave out on_token"
            )
        async with aclosing(across(caller, self._pieces(requests[0]))) as answer_pieces:
            async for piece in answer_pieces:
                if isinstance(piece, Completion):
                    return piece
                if not piece.thought:
                    await caller.call(on_token, piece.text)
        raise AssertionError("unreachable: an answer ends with a completion or an error")

    async def _batch(
        self, caller: Caller, prompts: Iterable[Prompt], on_error: OnError, options: BatchOptions
    ) -> list[Any]:
        max_parallel, on_result = options.pop("max_parallel", None), options.pop("on_result", None)
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error is {on_error!r}, but must be 'raise' or 'return'")
        if isinstance(prompts, str | bytes | Mapping):
            raise InvalidRequestError(
                f"a batch is a list of prompts, not {type(prompts).__name__}; use generate for one prompt"
            )
        ask = _ask(options)
        requests = [_request(ask, prompt, number) for number, prompt in enumerate(prompts)]
        ordered_results: list[Result | None] = [None] * len(requests)
        async with aclosing(across(caller, self.results(requests, max_parallel))) as result_stream:
            async for index, result in result_stream:
                ordered_results[index] = result.at(index) if isinstance(result, GenerationError) else result
                if on_result is not None:
                    await caller.call(on_result, index, result)
                if isinstance(result, GenerationError) and on_error == "raise":
                    raise BatchError(result, ordered_results) from result
        return ordered_results

    async def _batch_file(
        self, caller: Caller, prompts: str | Path, results: str | Path, options: BatchOptions
    ) -> FileSummary:
        max_parallel, on_result = options.pop("max_parallel", None), options.pop("on_result", None)
        ask, model = _ask(options), self._location.wanted_model or ""
        # If the prompt file cannot be read, this call raises the error before the results file is created.
        next(read_prompts(Path(prompts), ask, model), None)
        with ResultFile(Path(results)) as file:
            run = FileRun(Path(prompts), file, ask, model)
            async with aclosing(across(caller, self.results(run.requests(), max_parallel))) as result_stream:
                async for position, result in result_stream:
                    index = run.take(position, result)
                    if on_result is not None:
                        await caller.call(on_result, index, result)
            file.put_in_order()
        return run.summary

    async def results(
        self, requests: Iterable[Request | GenerationError], max_parallel: int | None = None
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Run requests concurrently.

        When a request ends, yield its index and its completion or error.

        `requests` is read lazily. The generator must run in the background event loop; see `across`.

        Args:
            requests: requests to run. If an item is an error instead of a request, the error is yielded as its result.
            max_parallel: number of concurrent requests, at least 1. None means `Target.width`.
        """
        if max_parallel is not None and max_parallel < 1:
            raise InvalidRequestError(f"max_parallel is {max_parallel}, but must be 1 or more")
        target = await self._open()
        async with aclosing(results(target, requests, max_parallel or target.width)) as result_stream:
            async for item in result_stream:
                yield item

    async def _pieces(self, request: Request) -> AsyncGenerator[Delta | Completion, None]:
        target = await background().targets.find(self._location)
        async with aclosing(pieces(target, replace(request, streamed=True))) as answer_pieces:
            async for piece in answer_pieces:
                yield piece

    async def _complete(self, requests: list[Request]) -> Completion:
        target = await background().targets.find(self._location)
        return await (complete(target, requests[0]) if len(requests) == 1 else complete_choices(target, requests))

    async def _embed(self, texts: str | Iterable[str]) -> Any:
        inputs = [texts] if isinstance(texts, str) else list(texts)
        for position, text in enumerate(inputs):
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"text {position} is not a string, or is empty; leave this text out")
        vectors = await (await self._open()).embed(inputs) if inputs else []
        return vectors[0] if isinstance(texts, str) else vectors

    async def _open(self, on_progress: OnProgress | None = None, holder: object = None) -> Target:
        target = await background().targets.find(self._location)
        await target.open(on_progress, holder)
        return target

    async def _close(self) -> None:
        await (await background().targets.find(self._location)).close(self)


_OPTIONS = AskOptions.__annotations__.keys() | SamplingOptions.__annotations__.keys() | {"model", "target", "n"}


def _ask(options: AskOptions) -> Ask:
    """Check the options of a call and return them as an `Ask`.

    Raises:
        TypeError: an option is unknown.
        InvalidRequestError: an option is invalid.
    """
    flat: dict[str, Any] = dict(options)
    for name in flat:
        if name not in _OPTIONS:
            matches = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean '{matches[0]}'?" if matches else f"options are: {', '.join(sorted(_OPTIONS))}"
            raise TypeError(f"there is no option '{name}'; {hint}")
    sampling = flat.pop("sampling", None) or Sampling()
    if not isinstance(sampling, Sampling):
        raise InvalidRequestError(f"sampling must be a Sampling, not {type(sampling).__name__}")
    system, schema, think = flat.pop("system", None), flat.pop("schema", None), flat.pop("think", None)
    images = flat.pop("images", None) or ()
    if isinstance(images, str | bytes) or not isinstance(images, Sequence):
        raise InvalidRequestError(
            f"images is a list of images, not {type(images).__name__}; for one image, write images=[image]"
        )
    parts = tuple(map(image_part, images))
    tools, tool_choice, logprobs = (flat.pop(name, None) for name in ("tools", "tool_choice", "logprobs"))
    return Ask(
        replace(sampling, **flat),
        system,
        AnswerSchema.from_schema(schema),
        think,
        parts,
        tool_definitions(tools or ()),
        chosen_tool(tool_choice),
        alternatives(logprobs),
    )


def _request(ask: Ask, prompt: Prompt, number: int) -> Request | GenerationError:
    try:
        return ask.request(prompt, number)
    except GenerationError as error:
        return error
