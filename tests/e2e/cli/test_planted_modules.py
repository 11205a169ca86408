"""Python files in the working directory, for example beside a downloaded model, never run."""

import re
import subprocess
import sys
from pathlib import Path

import helexa

PLANTED = ("jinja2", "llguidance", "msgspec", "numpy", "psutil", "tokenizers", "torch")
SOURCES = Path(helexa.__file__).parent
ASK = """
import sys, helexa
schema = {"enum": [1, 2]}
helexa.generate("hi", model=sys.argv[1], target="private", schema=schema, temperature=0, max_tokens=64)
"""


def test_python_modules_planted_beside_a_model_do_not_run_in_engine_processes(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    command = [sys.executable, "-P", "-c", ASK, str(smollm2_gguf)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert list(tmp_path.glob("*.ran")) == []
    assert run.returncode == 0, run.stderr


def test_each_python_subprocess_is_started_without_the_working_directory_on_its_module_path() -> None:
    """`python -m` looks for modules in the working directory first; `-P` turns that off."""
    lacking = re.compile(r'sys\.executable,\s*(\*\(\s*)?"-m"(?!, "compileall")')
    assert [path for path in SOURCES.rglob("*.py") if lacking.search(path.read_text())] == []
