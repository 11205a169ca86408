"""Modules that are executed only when one of their attributes is read."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from helexa.neuron.engine.deferred_modules import IMPORTED_BY_TORCH, defer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A list to which the modules `sample`, `sample.first` and `sample.second` append their names when they run."""
    executed: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    monkeypatch.setattr(sys, "sample_executed", executed, raising=False)
    (tmp_path / "sample").mkdir()
    for name in ("__init__", "first", "second"):
        (tmp_path / "sample" / f"{name}.py").write_text(
            "import sys\nsys.sample_executed.append(__name__)\n__all__ = ['number']\nnumber = 7\n"
        )
    yield executed
    for name in [name for name in sys.modules if name.partition(".")[0] == "sample"]:
        del sys.modules[name]


def test_deferred_module_is_executed_at_its_first_attribute_access(package: list[str]):
    defer(["sample.first"])
    first = import_module("sample.first")
    assert import_module("sample.first") is first is import_module("sample").first
    assert package == ["sample"]
    assert first.number == first.number == 7
    assert package == ["sample", "sample.first"]


def test_import_of_a_name_from_a_deferred_module_executes_the_module(package: list[str]):
    defer(["sample.first", "sample.second"])
    names: dict[str, object] = {}
    exec("from sample.first import number", names)
    exec("from sample.second import *", names)
    assert names["number"] == 7
    assert package == ["sample", "sample.first", "sample.second"]


def test_import_of_a_submodule_does_not_execute_its_deferred_package(package: list[str]):
    defer(["sample"])
    assert import_module("sample.first").number == 7
    assert package == ["sample.first"]


def test_missing_attribute_or_missing_deferred_module_raises_the_standard_error(package: list[str]):
    defer(["sample.first", "sample.third"])
    with pytest.raises(AttributeError):
        _ = import_module("sample.first").missing
    with pytest.raises(ModuleNotFoundError):
        import_module("sample.third")


def test_import_of_torch_does_not_execute_the_deferred_modules():
    script = (
        "import sys\n"
        "from helexa.neuron.engine.deferred_modules import IMPORTED_BY_TORCH, defer\n"
        "defer(IMPORTED_BY_TORCH)\n"
        "import torch\n"
        "deferred = [name for name in IMPORTED_BY_TORCH if type(sys.modules.get(name)).__name__ == '_DeferredModule']\n"
        "print(*deferred)\n"
        "assert torch.distributions.Normal(0.0, 1.0).mean == 0\n"
        "assert torch.export.Dim('rows').__name__ == 'rows'\n"
        "assert torch.ao.quantization.default_qconfig\n"
    )
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert set(IMPORTED_BY_TORCH) - set(printed.split()) <= {"pynvml"}  # may not be installed


@pytest.mark.parametrize("process", ["rank_process", "stage_process"])
def test_rank_and_stage_processes_also_defer_modules_of_torch(process: str):
    script = (
        "import sys\n"
        f"from helexa.neuron.engine.{process} import main\n"
        "sys.argv = ['process', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    import torch\n"
        "    print('modules:', *sys.modules)\n"
    )
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    modules = printed.rpartition("modules:")[2].split()
    assert "torch.nn" in modules
    assert "torch.optim.adam" not in modules
