"""The tensors of the engine: torch's, or numpy arrays with torch's methods.

Models, layers, weights and the engine are written once, with torch's names: `tensors.cat`, `tensors.float32`,
`x.view(...)`. Each engine process chooses a *backend*, which provides the names:

* `numpy`: the native kernels compute the model, and no process imports torch. Only the functions and methods exist that
  this code path uses (`helexa.neuron.tensors.functions`, `helexa.neuron.tensors.array`).
* `torch`: for GPUs, for plain torch on the CPU, and for the tests.

The attributes of this module are looked up when they are used, not when a module is imported. A module must therefore
not keep dtypes or tensors in global variables.
"""

import importlib.util
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import lru_cache, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeAlias, TypeVar

from helexa.core.errors import HelexaError

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor

    Device: TypeAlias = torch.device
    DType: TypeAlias = torch.dtype
else:
    from abc import ABCMeta

    DType = Device = Any

    class Tensor(metaclass=ABCMeta):  # noqa: B024
        """A tensor of the chosen backend, for `isinstance` with both backends."""


Backend = Literal["numpy", "torch"]
_P = ParamSpec("_P")
_R = TypeVar("_R")
_names: ModuleType | None = None
_caches: list[Callable[[], None]] = []


class TorchRequired(HelexaError):
    """The native kernels cannot compute a part of a model; the message names the part."""


def use(backend: Backend) -> None:
    """Choose the tensors' backend of this process.

    Tensors of the previous backend are invalid afterwards. Without a call, the first use chooses `torch`.
    """
    global _names  # noqa: PLW0603  # one backend per process
    names = importlib.import_module(f"helexa.neuron.tensors.{'functions' if backend == 'numpy' else 'with_torch'}")
    names.prepare()
    if names is not _names:
        _names = names
        for clear in _caches:
            clear()


def uses_torch() -> bool:
    """Return whether the tensors of this process are torch's."""
    return _chosen().__name__.endswith("with_torch")


def torch_is_installed() -> bool:
    """Return whether torch is installed, without importing it."""
    return importlib.util.find_spec("torch") is not None


def require_torch(what: str) -> None:
    """Raise `TorchRequired`, which names `what`, unless this process uses torch."""
    if not uses_torch():
        raise TorchRequired(what)


def cached(size: int | None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that caches results until another backend is chosen.

    At most `size` results are kept; None for no limit. The arguments of the function must be hashable.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        results = lru_cache(size)(function)
        # `use` clears these caches, because a result may contain tensors of the old backend.
        _caches.append(results.cache_clear)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return results(*args, **kwargs)  # pyright: ignore[reportArgumentType]

        return call

    return decorate


class inference_mode(ContextDecorator):  # named as in torch
    """A context, and a decorator of functions, in which torch records no gradients."""

    def __enter__(self) -> Self:
        self._context = _chosen().inference_mode()
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def _recreate_cm(self) -> "inference_mode":
        return inference_mode()  # each call needs its own context, because a decorated function may call itself


def _chosen() -> ModuleType:
    if _names is None:
        use("torch")
    assert _names is not None
    return _names


def __getattr__(name: str) -> Any:
    return getattr(_chosen(), name)
