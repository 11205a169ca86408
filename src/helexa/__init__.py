"""Self-hosted LLM serving: a gateway (cortex), nodes (neuron), and a Python library for text generation.

import helexa

print(helexa.generate("Why is the sky blue?"))
"""

from typing import TYPE_CHECKING, Any

from helexa.core.version import __version__ as __version__

if TYPE_CHECKING:
    from helexa.core.errors import HelexaError
    from helexa.generation.completion import Completion, Delta, Timings, Usage
    from helexa.generation.errors import (
        BatchError,
        ContextLengthError,
        EngineError,
        GenerationError,
        InvalidRequestError,
        ModelNotFoundError,
        SchemaError,
        UnreachableError,
    )
    from helexa.generation.files.file_run import FileSummary
    from helexa.generation.library import (
        abatch,
        abatch_file,
        agenerate,
        apull,
        astream,
        batch,
        batch_file,
        generate,
        load,
        pull,
        stream,
    )
    from helexa.generation.model import AsyncStream, Model, Stream
    from helexa.generation.sampling import Sampling

__all__ = [
    "AsyncStream",
    "BatchError",
    "Completion",
    "ContextLengthError",
    "Delta",
    "EngineError",
    "FileSummary",
    "GenerationError",
    "HelexaError",
    "InvalidRequestError",
    "Model",
    "ModelNotFoundError",
    "Sampling",
    "SchemaError",
    "Stream",
    "Timings",
    "UnreachableError",
    "Usage",
    "abatch",
    "abatch_file",
    "agenerate",
    "apull",
    "astream",
    "batch",
    "batch_file",
    "generate",
    "load",
    "pull",
    "stream",
]

_HOMES = {
    "helexa.core.errors": ("HelexaError",),
    "helexa.generation.completion": ("Completion", "Delta", "Timings", "Usage"),
    "helexa.generation.errors": (
        "BatchError",
        "ContextLengthError",
        "EngineError",
        "GenerationError",
        "InvalidRequestError",
        "ModelNotFoundError",
        "SchemaError",
        "UnreachableError",
    ),
    "helexa.generation.files.file_run": ("FileSummary",),
    "helexa.generation.library": (
        "abatch",
        "abatch_file",
        "agenerate",
        "apull",
        "astream",
        "batch",
        "batch_file",
        "generate",
        "load",
        "pull",
        "stream",
    ),
    "helexa.generation.model": ("AsyncStream", "Model", "Stream"),
    "helexa.generation.sampling": ("Sampling",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'helexa' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
