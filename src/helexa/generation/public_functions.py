"""The functions of `import helexa`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from helexa.core.errors import explained_extras
from helexa.generation.background_event_loop import AsyncCaller, BlockingCaller, blocking
from helexa.generation.batch_file import FileSummary
from helexa.generation.completion import Completion
from helexa.generation.errors import GenerationError
from helexa.generation.model import AsyncStream, Model, OnError, OnToken, Stream
from helexa.generation.options import AskOptions, BatchOptions
from helexa.generation.request import Prompt
from helexa.generation.target import OnProgress
from helexa.generation.target_choice import ModelLocation

_LOCATION_FIELDS = ("model", "target", "device", "dtype", "quant")


class Options(AskOptions, total=False):
    """Options of generation (see `AskOptions`), and of what runs the model.

    A private engine is an engine that the library starts for itself, without a server. If an option is None, its
    environment variable is read, or a default is used.

    Attributes:
        model: `org/name`, `scheme:name`, or a path. Default: `HELEXA_MODEL`, else the server's first loaded model, or
            `helexa/small` for a private engine.
        target: URL of a gateway or a node, or `private`. Default: `HELEXA_BASE_URL`, else a server on this machine that
            has the model loaded, else a private engine.
        device: device of a private engine: `cpu`, `cuda`, `cuda:N`, `mps` or `auto`.
        dtype: data type of activations in a private engine.
        quant: quantization of the model in a private engine, such as `q4_k_m`.
    """

    model: str | None
    target: str | None
    device: str | None
    dtype: str | None
    quant: str | None


class BatchTargetOptions(BatchOptions, Options, total=False):
    """Options of a batch (see `BatchOptions`), and of what runs it (see `Options`)."""


def generate(prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[Options]) -> Completion:
    """Generate a response to a prompt, and return it as a completion.

    Args:
        prompt: the text of a user message, or a list of chat messages.
        n: number of responses, each with a different seed; see `Completion.choices`.
        on_token: plain or async function, called with each chunk of the response's text, without reasoning. If the
            function raises an exception, the request is canceled and the exception is raised. Requires `n=1`.
        options: see `Options`.

    Raises:
        HelexaError: the model could not be downloaded or loaded.
        GenerationError: the request failed.
    """
    model, generation_options = _split(options)
    return model.generate(prompt, n=n, on_token=on_token, **generation_options)


async def agenerate(
    prompt: Prompt, *, n: int = 1, on_token: OnToken | None = None, **options: Unpack[Options]
) -> Completion:
    """Generate a response to a prompt: the async version of `generate`.

    If the calling task is canceled, the request is canceled.
    """
    model, generation_options = _split(options)
    return await model.agenerate(prompt, n=n, on_token=on_token, **generation_options)


def stream(prompt: Prompt, **options: Unpack[Options]) -> Stream:
    """Return the chunks of a response to a prompt as they are generated.

    Invalid options and prompts raise errors at once. The iteration starts the request, and raises all other errors of
    `generate`.
    """
    model, generation_options = _split(options)
    return model.stream(prompt, **generation_options)


def astream(prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
    """Return the chunks of a response to a prompt, for `async for`.

    This is the async version of `stream`.
    """
    model, generation_options = _split(options)
    return model.astream(prompt, **generation_options)


@overload
def batch(
    prompts: Iterable[Prompt], *, on_error: Literal["raise"] = "raise", **options: Unpack[BatchTargetOptions]
) -> list[Completion]: ...


@overload
def batch(
    prompts: Iterable[Prompt], *, on_error: Literal["return"], **options: Unpack[BatchTargetOptions]
) -> list[Completion | GenerationError]: ...


def batch(prompts: Iterable[Prompt], *, on_error: OnError = "raise", **options: Unpack[BatchTargetOptions]) -> Any:
    """Generate responses to many prompts concurrently; return them in prompt order.

    Args:
        prompts: texts of user messages, or lists of chat messages.
        on_error: what to do if a prompt fails. `raise` ends the batch at the first error. `return` continues, and the
            returned list contains the error as the result of the prompt.
        options: see `Options` and `BatchOptions`.

    Raises:
        HelexaError: the model could not be downloaded or loaded, or the server has not responded to any request.
        BatchError: a prompt failed and `on_error` is `raise`. The error contains the results so far.
    """
    model, generation_options = _split(options)
    return model.batch(prompts, on_error=on_error, **generation_options)  # type: ignore[call-overload]


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
    """Generate responses to many prompts: the async version of `batch`.

    If the calling task is canceled, the batch ends.
    """
    model, generation_options = _split(options)
    return await model.abatch(prompts, on_error=on_error, **generation_options)  # type: ignore[call-overload]


def batch_file(prompts: str | Path, results: str | Path, **options: Unpack[BatchTargetOptions]) -> FileSummary:
    """Generate responses to the prompts in a file, and write them to another file.

    Each result is written as soon as it is ready. If the process is killed, the next call with the same files runs only
    the prompts that have no completion yet. After the last prompt, the lines are sorted in the order of the prompts. If
    a prompt fails, its line contains the error, and the next call repeats the prompt.

    Args:
        prompts: path of the file of prompts. Each line is a string, a list of messages, or an object with a `prompt`
            or `messages`, and options.
        results: path of the file of results.
        options: see `Options` and `BatchOptions`.

    Raises:
        HelexaError: the model could not be downloaded or loaded, or the server has not responded to any request.
        InvalidRequestError: the file of results has results of other prompts or other data, or another process writes
            to it.
        OSError: a file cannot be read or written.
    """
    model, generation_options = _split(options)
    return model.batch_file(prompts, results, **generation_options)


async def abatch_file(prompts: str | Path, results: str | Path, **options: Unpack[BatchTargetOptions]) -> FileSummary:
    """Generate responses to the prompts in a file: the async version of `batch_file`."""
    model, generation_options = _split(options)
    return await model.abatch_file(prompts, results, **generation_options)


class EmbedOptions(TypedDict, total=False):
    """Options of the target that computes embeddings; see `Options`."""

    model: str | None
    target: str | None
    device: str | None
    dtype: str | None
    quant: str | None


@overload
def embed(texts: str, **options: Unpack[EmbedOptions]) -> list[float]: ...  # type: ignore[overload-overlap]


@overload
def embed(texts: Iterable[str], **options: Unpack[EmbedOptions]) -> list[list[float]]: ...


def embed(texts: str | Iterable[str], **options: Unpack[EmbedOptions]) -> Any:
    """Return the embeddings of texts: vectors with the L2 norm 1.

    Args:
        texts: one text, for which the function returns one vector, or several texts, for which it returns a list of
            vectors in the order of the texts.
        options: see `Options`.

    Raises:
        HelexaError: the model could not be downloaded or loaded.
        GenerationError: the request failed.
    """
    return _located(options).embed(texts)


@overload
async def aembed(texts: str, **options: Unpack[EmbedOptions]) -> list[float]: ...


@overload
async def aembed(texts: Iterable[str], **options: Unpack[EmbedOptions]) -> list[list[float]]: ...


async def aembed(texts: str | Iterable[str], **options: Unpack[EmbedOptions]) -> Any:
    """Return the embeddings of texts: the async version of `embed`."""
    return await _located(options).aembed(texts)


def load(
    model: str | None = None,
    *,
    target: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    quant: str | None = None,
    on_progress: OnProgress | None = None,
) -> Model:
    """Load a model, and return an object with methods to generate responses.

    If the model is on a server, this function does not load it: the server decides when to load its models. See
    `Options` for the arguments, and `OnProgress` for `on_progress`, which is called in another thread.

    The returned object can be used in a `with` block. At the end of the block, the model is unloaded from its private
    engine, unless another object from `load` still uses the model. Without a `with` block, the model stays loaded until
    `Model.close` is called or the process ends.

    Raises:
        HelexaError: the model could not be downloaded or loaded.
    """
    loaded = Model(ModelLocation(model, target, device, dtype, quant))
    loaded.open(on_progress)
    return loaded


def pull(model: str, *, quant: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download a model, or update it if the downloaded files are outdated.

    Return the path of its file or folder.

    Args:
        model: `org/name`, `scheme:name`, or a path.
        quant: quantization, which selects one of several GGUF files.
        on_progress: called in another thread with three arguments: name of the current stage, number of downloaded
            bytes, and total number of bytes (0 if unknown).

    Raises:
        SourceError: the download failed. The attribute `kind` names the reason.
    """
    return blocking(BlockingCaller().wait(_pull(model, quant, on_progress)))


async def apull(model: str, *, quant: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download or update a model: the async version of `pull`.

    The next call resumes a canceled download.
    """
    return await AsyncCaller().wait(_pull(model, quant, on_progress))


async def _pull(model: str, quant: str | None, on_progress: OnProgress | None) -> Path:
    with explained_extras():
        from helexa.generation.private import fetch

    return await fetch(model, quant, on_progress)


def _located(options: EmbedOptions) -> Model:
    return Model(ModelLocation(**options))


def _split(options: Options | BatchTargetOptions) -> tuple[Model, Any]:
    """Return a `Model` for the options in `_LOCATION_FIELDS`, and all other options."""
    generation_options: Any = dict(options)
    return Model(ModelLocation(*(generation_options.pop(name, None) for name in _LOCATION_FIELDS))), generation_options
