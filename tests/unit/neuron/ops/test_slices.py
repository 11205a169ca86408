"""The functions of slices compute the same as plain C, on this processor and on emulated Arm processors."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from helexa.neuron.ops.native import compilation
from helexa.neuron.ops.native.compilation import FLAGS, KERNELS
from neuron.ops.native.emulated_library import CROSS_COMPILER, EMULATOR, PROCESSORS, SYSROOT

SOURCE = Path(__file__).with_name("slices") / "cases.c"
SECONDS = 60


@pytest.mark.parametrize("level", compilation.LEVELS, ids=lambda level: level.name)
def test_vector_functions_of_each_instruction_set_equal_plain_c(level: compilation.Level, tmp_path: Path) -> None:
    compiler, emulator = "cc", list[str]()
    if level.name in PROCESSORS:
        compiler, emulator = CROSS_COMPILER, [EMULATOR, "-cpu", PROCESSORS[level.name], "-L", SYSROOT]
    elif level.machine != platform.machine() or not level.requires <= compilation.processor_flags():
        pytest.skip(f"this processor is no {level.name}")
    for program in (compiler, *emulator[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine")
    flags = [flag for flag in FLAGS if not flag.startswith("-O")]
    command = [compiler, "-O1", *flags, *level.flags, f"-I{KERNELS}", str(SOURCE), "-o", str(tmp_path / "cases"), "-lm"]
    subprocess.run(command, check=True, timeout=SECONDS)
    run = subprocess.run([*emulator, tmp_path / "cases"], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
