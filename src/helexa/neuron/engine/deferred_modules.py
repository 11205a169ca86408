"""Defers the execution of modules that a program imports but may never use."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # `importlib.abc` imports 15 modules, among them `tempfile`

# Modules that `import torch` executes and engines seldom use. They take a third of the time of this import.
# `torch._meta_registrations` is needed only for computing with meta tensors, as `torch.compile` and `torch.export` do.
# Engines use meta tensors only for their shapes and dtypes.
IMPORTED_BY_TORCH = (
    "pynvml",
    "torch._meta_registrations",
    "torch.ao",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.optim",
    "torch.quantization",
    "torch.utils.data",
)

# Deferred module -> module that is imported at once when the deferred module is imported. In torch 2.15, `torch.fx`
# must not be imported later, because `torch._logging` would then import `torch.fx` before `torch.fx` is complete.
_IMPORTED_EARLIER = {"torch.quantization": "torch.fx"}


def defer(names: Sequence[str]) -> None:
    """Let later imports of `names` execute a module only when an attribute is read."""
    # `importlib.util.LazyLoader` would not do, because it executes a module when the module is imported a second time.
    sys.meta_path.insert(0, _Finder(names))


class _Finder:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


class _DeferringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> "_DeferredModule":
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if (name := _IMPORTED_EARLIER.get(module.__name__)) is not None:
            import_module(name)

    def execute(self, module: ModuleType) -> None:
        # The class is replaced first. Otherwise reads of attributes by the module's own code would execute the module
        # again.
        module.__class__ = ModuleType
        self._loader.exec_module(module)


class _DeferredModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            # The import system and `inspect` read names such as `__spec__`. Reading them must not execute the module.
            raise AttributeError(name)
        loader = self.__loader__
        assert isinstance(loader, _DeferringLoader)
        loader.execute(self)
        return getattr(self, name)
