"""Check whether Python keeps the compiled modules of a package. If not, each start of a process compiles them again."""

import shlex
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from helexa.neuron.doctor.check_result import CheckResult


def look_at_compiled_modules(package: str) -> Iterator[CheckResult]:
    """Report if an installed and already imported package has no compiled modules."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():
        return
    folder = Path(spec.origin).parent
    if sys.dont_write_bytecode:
        remedy = "unset PYTHONDONTWRITEBYTECODE"
    else:
        command = shlex.join([sys.executable, "-m", "compileall", "-q", str(folder)])
        remedy = f"as a user who may write to its folder, run {command}"
    yield CheckResult(package, "note", f"to make starts faster: each start compiles {package} again; {remedy}")
