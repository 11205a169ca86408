"""The functions of `import helexa`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from helexa.core.extras import explained_extras
from helexa.generation.background import Awaiting, Blocking, blocking
from helexa.generation.completion import Completion
from helexa.generation.errors import GenerationError
from helexa.generation.files.file_run import FileSummary
from helexa.generation.model import AskOptions, AsyncStream, BatchOptions, Model, OnError, OnToken, Stream
from helexa.generation.request import Prompt
from helexa.generation.target import OnProgress
from helexa.generation.targets import ModelLocation

_LOCATION_FIELDS = ("model", "target", "device", "dtype", "quant")


class Options(AskOptions, total=False):
    """Options of answers (see `AskOptions`) and of the target, which is a server or a private engine.

    An option that is None has the value of its environment variable, or a default.

    Attributes:
        model: `org/name`, `scheme:name`, or a path. Default: `HELEXA_MODEL`, else the server's first loaded model, or
            `helexa/small` for a private engine.
        target: URL of a gateway or a node, or `private`. Default: `HELEXA_BASE_URL`, else a server on this machine that
            has the model loaded, else a private engine.
        device, dtype, quant: settings of a private engine; see `EngineSettings`. `quant` selects a quantization.
    """

    model: str | None
    target: str | None
    device: str | None
    dtype: str | None
    quant: str | None


class BatchTargetOptions(BatchOptions, Options, total=False):
    """Options of a batch (see `BatchOptions`) and of its target (see `Options`)."""


def generate(prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[Options]) -> Completion:
    """Answer a prompt.

    Args:
        prompt: the text of a user message, or a conversation.
        n: number of answers, each with its own seed; see `Completion.choices`.
        on_token: plain or async function, called with each piece of the answer's text. If the function raises an
            exception, the request is canceled and the exception is raised.
        options: see `Options`.

    Raises:
        HelexaError: the model could not be loaded or fetched.
        GenerationError: the request failed.
    """
    model, rest = _split(options)
    return model.generate(prompt, n=n, on_token=on_token, **rest)


async def agenerate(
    prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[Options]
) -> Completion:
    """Answer a prompt like `generate`, for coroutines; cancellation cancels the request."""
    model, rest = _split(options)
    return await model.agenerate(prompt, n=n, on_token=on_token, **rest)


def stream(prompt: Prompt, **options: Unpack[Options]) -> Stream:
    """Answer a prompt, and return an iterator over the pieces of the answer. Iterating raises errors as `generate`."""
    model, rest = _split(options)
    return model.stream(prompt, **rest)


def astream(prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
    """Answer a prompt like `stream`, for coroutines: return an async iterator over the pieces of the answer."""
    model, rest = _split(options)
    return model.astream(prompt, **rest)


@overload
def batch(
    prompts: Iterable[Prompt], *, on_error: Literal["raise"] = "raise", **options: Unpack[BatchTargetOptions]
) -> list[Completion]: ...


@overload
def batch(
    prompts: Iterable[Prompt], *, on_error: Literal["return"], **options: Unpack[BatchTargetOptions]
) -> list[Completion | GenerationError]: ...


def batch(prompts: Iterable[Prompt], *, on_error: OnError = "raise", **options: Unpack[BatchTargetOptions]) -> Any:
    """Answer many prompts concurrently; return the results in the order of the prompts.

    Args:
        prompts: the prompts.
        on_error: `return` stores the error of a prompt in place of its result and continues; `raise` ends the batch at
            the first error.
        options: see `Options` and `BatchOptions`.

    Raises:
        HelexaError: the model could not be loaded or fetched.
        BatchError: a prompt failed; the error contains the results so far.
    """
    model, rest = _split(options)
    return model.batch(prompts, on_error=on_error, **rest)  # type: ignore[call-overload]


@overload
async def abatch(
    prompts: Iterable[Prompt], *, on_error: Literal["raise"] = "raise", **options: Unpack[BatchTargetOptions]
) -> list[Completion]: ...


@overload
async def abatch(
    prompts: Iterable[Prompt], *, on_error: Literal["return"], **options: Unpack[BatchTargetOptions]
) -> list[Completion | GenerationError]: ...


async def abatch(
    prompts: Iterable[Prompt], *, on_error: OnError = "raise", **options: Unpack[BatchTargetOptions]
) -> Any:
    """Answer many prompts like `batch`, for coroutines; cancellation ends the batch."""
    model, rest = _split(options)
    return await model.abatch(prompts, on_error=on_error, **rest)  # type: ignore[call-overload]


def batch_file(prompts: str | Path, results: str | Path, **options: Unpack[BatchTargetOptions]) -> FileSummary:
    """Answer the prompts in a file of JSON lines, and write the results to another file; interrupted runs resume.

    Each result is written as soon as its prompt is answered, with the `index` of the prompt, and survives the death of
    this process. At the end, the lines are sorted in the order of the prompts. If a prompt fails, its line contains the
    error, and the next run repeats the prompt.

    Args:
        prompts: path of a file; each line is a string, a list of messages or an object with a `prompt`; see
            `prompt_file`.
        results: path of the file of results.
        options: as in `batch`.

    Raises:
        HelexaError: the model could not be loaded or fetched.
        InvalidRequestError: the results belong to other prompts, or another process writes to the file of results.
        OSError: a file cannot be read or written.
    """
    model, rest = _split(options)
    return model.batch_file(prompts, results, **rest)


async def abatch_file(prompts: str | Path, results: str | Path, **options: Unpack[BatchTargetOptions]) -> FileSummary:
    """Answer a file of prompts like `batch_file`, for coroutines."""
    model, rest = _split(options)
    return await model.abatch_file(prompts, results, **rest)


def load(
    model: str | None = None,
    *,
    target: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    quant: str | None = None,
    on_progress: OnProgress | None = None,
) -> Model:
    """Load a model and return an object with methods to answer prompts. See `Options` for the arguments.

    At the end of its `with` block, the model is unloaded from its private engine, unless another `load` still uses the
    model. Without a `with` block, the model stays loaded until the process ends.

    Raises:
        HelexaError: the model could not be loaded or fetched.
    """
    loaded = Model(ModelLocation(model, target, device, dtype, quant))
    loaded.open(on_progress)
    return loaded


def pull(model: str, *, quant: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download a model unless it is cached; return the path of its file or folder.

    Args:
        model: `org/name`, `scheme:name`, or a path.
        quant: selects one of several GGUF files.
        on_progress: called in another thread with the name of a stage, the bytes done, and the total bytes (0 if
            unknown).

    Raises:
        SourceError: the download failed; `kind` names the reason.
    """
    return blocking(Blocking().wait(_pull(model, quant, on_progress)))


async def apull(model: str, *, quant: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download a model like `pull`, for coroutines; a canceled download resumes at the next call."""
    return await Awaiting().wait(_pull(model, quant, on_progress))


async def _pull(model: str, quant: str | None, on_progress: OnProgress | None) -> Path:
    with explained_extras():
        from helexa.generation.private import fetch

    return await fetch(model, quant, on_progress)


def _split(options: Options | BatchTargetOptions) -> tuple[Model, Any]:
    """Return the model selected by `options`, and the remaining options."""
    rest: Any = dict(options)
    return Model(ModelLocation(*(rest.pop(name, None) for name in _LOCATION_FIELDS))), rest
