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
from helexa.generation.targets import Place

_PLACE = ("model", "target", "device", "dtype", "quant")


class Options(AskOptions, total=False):
    """How to answer (see `AskOptions`) and where; None leaves that to the environment, then to what there is.

    Attributes:
        model: its id, `org/name`, `scheme:name` or a path; else `HELEXA_MODEL`, else the first that is loaded.
        target: the URL of a gateway or a node, or `private`; else `HELEXA_BASE_URL`, else what listens on this
            machine and has the model loaded, else a private engine.
        device, dtype, quant: of a private engine; see `EngineSettings`.
    """

    model: str | None
    target: str | None
    device: str | None
    dtype: str | None
    quant: str | None


class BatchPlaceOptions(BatchOptions, Options, total=False):
    """How to answer many prompts, and where."""


def generate(prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[Options]) -> Completion:
    """Answer a prompt.

    Args:
        prompt: a question, or a conversation.
        n: how many answers; see `Completion.choices`. Each has a seed of its own.
        on_token: told of each piece as it comes, plain or async; what it raises ends the answer and comes out here.

    Raises:
        HelexaError: the model cannot be had.
        GenerationError: there is no answer.
    """
    model, model_options = _split(options)
    return model.generate(prompt, n=n, on_token=on_token, **model_options)


async def agenerate(
    prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[Options]
) -> Completion:
    """`generate` for coroutines; cancelling it ends the answer."""
    model, model_options = _split(options)
    return await model.agenerate(prompt, n=n, on_token=on_token, **model_options)


def stream(prompt: Prompt, **options: Unpack[Options]) -> Stream:
    """Answer a prompt piece by piece; raises what `generate` raises, while it is iterated over."""
    model, model_options = _split(options)
    return model.stream(prompt, **model_options)


def astream(prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
    """`stream` for coroutines."""
    model, model_options = _split(options)
    return model.astream(prompt, **model_options)


@overload
def batch(
    prompts: Iterable[Prompt], *, on_error: Literal["raise"] = "raise", **options: Unpack[BatchPlaceOptions]
) -> list[Completion]: ...


@overload
def batch(
    prompts: Iterable[Prompt], *, on_error: Literal["return"], **options: Unpack[BatchPlaceOptions]
) -> list[Completion | GenerationError]: ...


def batch(prompts: Iterable[Prompt], *, on_error: OnError = "raise", **options: Unpack[BatchPlaceOptions]) -> Any:
    """Answer many prompts, side by side; the results are in the order of the prompts.

    Args:
        on_error: `return` puts an error in the place of its result and goes on; `raise` ends the batch with it.
        options: see `Options` and `BatchOptions`.

    Raises:
        HelexaError: the model cannot be had.
        BatchError: a prompt has no answer; it has the results so far.
    """
    model, model_options = _split(options)
    return model.batch(prompts, on_error=on_error, **model_options)  # type: ignore[call-overload]


@overload
async def abatch(
    prompts: Iterable[Prompt], *, on_error: Literal["raise"] = "raise", **options: Unpack[BatchPlaceOptions]
) -> list[Completion]: ...


@overload
async def abatch(
    prompts: Iterable[Prompt], *, on_error: Literal["return"], **options: Unpack[BatchPlaceOptions]
) -> list[Completion | GenerationError]: ...


async def abatch(
    prompts: Iterable[Prompt], *, on_error: OnError = "raise", **options: Unpack[BatchPlaceOptions]
) -> Any:
    """`batch` for coroutines; cancelling it ends the batch."""
    model, model_options = _split(options)
    return await model.abatch(prompts, on_error=on_error, **model_options)  # type: ignore[call-overload]


def batch_file(prompts: str | Path, results: str | Path, **options: Unpack[BatchPlaceOptions]) -> FileSummary:
    """Answer a file of prompts, in JSON lines, into a file of results, and go on where an earlier run has ended.

    Each result is in the file as soon as it is known, with the `index` of its prompt, and stays there however this
    process ends. When all are known the lines are put in the order of the prompts. A prompt that has no answer is told
    in its line, and asked again in the next run.

    Args:
        prompts: a string, a list of messages or an object with a `prompt` in each line; see `prompt_file`.
        options: as in `batch`.

    Raises:
        HelexaError: the model cannot be had.
        InvalidRequestError: the results are those of other prompts, or another process is writing them.
        OSError: a file cannot be read or written.
    """
    model, model_options = _split(options)
    return model.batch_file(prompts, results, **model_options)


async def abatch_file(prompts: str | Path, results: str | Path, **options: Unpack[BatchPlaceOptions]) -> FileSummary:
    """`batch_file` for coroutines."""
    model, model_options = _split(options)
    return await model.abatch_file(prompts, results, **model_options)


def load(
    model: str | None = None,
    *,
    target: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    quant: str | None = None,
    on_progress: OnProgress | None = None,
) -> Model:
    """Have a model ready, to be asked by the methods of what is returned. See `Options` for the arguments.

    Leaving its `with` block unloads a model from its private engine, unless another `load` holds it. Without a block it
    stays as long as this process.

    Raises:
        HelexaError: it cannot be had.
    """
    loaded = Model(Place(model, target, device, dtype, quant))
    loaded.open(on_progress)
    return loaded


def pull(model: str, *, quant: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """Fetch a model, unless it is here; the path of its file or folder.

    Args:
        quant: which of several GGUF files.
        on_progress: told of a stage, of the bytes done, and of those in all (0: unknown); called in another thread.

    Raises:
        SourceError: it cannot be had; `kind` says why.
    """
    return blocking(Blocking().wait(_pull(model, quant, on_progress)))


async def apull(model: str, *, quant: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """`pull` for coroutines; cancelling it ends the download, which goes on next time."""
    return await Awaiting().wait(_pull(model, quant, on_progress))


async def _pull(model: str, quant: str | None, on_progress: OnProgress | None) -> Path:
    with explained_extras():
        from helexa.generation.private import fetch

    return await fetch(model, quant, on_progress)


def _split(options: Options | BatchPlaceOptions) -> tuple[Model, Any]:
    """The model where `options` say, and the rest of them."""
    model_options: Any = dict(options)
    return Model(Place(*(model_options.pop(name, None) for name in _PLACE))), model_options
