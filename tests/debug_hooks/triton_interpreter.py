"""Makes Triton's interpreter, which runs GPU kernels on the CPU, more than twice as fast.

The interpreter is the slowest part of many tests. The import of this module changes it:

* Triton patches its modules again for each function that a kernel calls. Here, each launch patches them once.
* The interpreter computes each sum, difference and product of integers a second time with 64 bits, to report an
  overflow. Compiled kernels do not, and the tests' tensors are small. Here, only `make nightly` checks overflow.
"""

import os
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

_patch_modules = interpreter._patch_lang


def _patch_once(kernel: Any) -> Any:
    """Patch both modules, whichever of them the kernel itself uses: the functions that it calls may use the other."""
    return _patch_modules(SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core}))


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


_checks_overflow = os.environ.get("HELEXA_NIGHTLY") == "1"
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=_checks_overflow)
interpreter._patch_lang = _patch_once
interpreter.InterpretedFunction.__call__ = _call
