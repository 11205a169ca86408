"""Self-hosted LLM serving: a gateway, nodes, and a Python library.

import helexa

print(helexa.generate("Why is the sky blue?"))
"""

from typing import TYPE_CHECKING, Any

from helexa.core.version import __version__ as __version__

if TYPE_CHECKING:
    from helexa.core.errors import HelexaError
    from helexa.core.sampling import Sampling
    from helexa.generation.batch_file import FileSummary
    from helexa.generation.completion import Completion, Delta, Timings, TokenLogprob, ToolCall, Usage
    from helexa.generation.errors import (
        AuthenticationError,
        BatchError,
        ContextLengthError,
        EngineError,
        GenerationError,
        InvalidRequestError,
        ModelNotFoundError,
        NotFoundError,
        OverloadedError,
        PermissionDeniedError,
        RateLimitError,
        SchemaError,
        UnreachableError,
    )
    from helexa.generation.model import AsyncStream, Model, Stream
    from helexa.generation.public_functions import (
        abatch,
        abatch_file,
        aembed,
        agenerate,
        apull,
        astream,
        batch,
        batch_file,
        embed,
        generate,
        load,
        pull,
        stream,
    )

__all__ = [
    "AsyncStream",
    "AuthenticationError",
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
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "RateLimitError",
    "Sampling",
    "SchemaError",
    "Stream",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "UnreachableError",
    "Usage",
    "abatch",
    "abatch_file",
    "aembed",
    "agenerate",
    "apull",
    "astream",
    "batch",
    "batch_file",
    "embed",
    "generate",
    "load",
    "pull",
    "stream",
]

# Public names by module. A module is imported at the first use of one of its names.
_HOMES = {
    "helexa.core.errors": ("HelexaError",),
    "helexa.core.sampling": ("Sampling",),
    "helexa.generation.completion": ("Completion", "Delta", "Timings", "TokenLogprob", "ToolCall", "Usage"),
    "helexa.generation.errors": (
        "AuthenticationError",
        "BatchError",
        "ContextLengthError",
        "EngineError",
        "GenerationError",
        "InvalidRequestError",
        "ModelNotFoundError",
        "NotFoundError",
        "OverloadedError",
        "PermissionDeniedError",
        "RateLimitError",
        "SchemaError",
        "UnreachableError",
    ),
    "helexa.generation.batch_file": ("FileSummary",),
    "helexa.generation.public_functions": (
        "abatch",
        "abatch_file",
        "aembed",
        "agenerate",
        "apull",
        "astream",
        "batch",
        "batch_file",
        "embed",
        "generate",
        "load",
        "pull",
        "stream",
    ),
    "helexa.generation.model": ("AsyncStream", "Model", "Stream"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'helexa' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
