"""The choice among the prebuilt kernels of a platform wheel."""

import ctypes
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import helexa
from helexa.neuron.ops.native import compilation, kernel_library
from helexa.neuron.ops.native.kernel_library import KernelLibrary

ROOT = Path(helexa.__file__).parents[2]
HASWELL = "fpu sse4_2 avx avx2 fma f16c bmi1 bmi2 movbe abm"
CROSS_COMPILER = "aarch64-linux-gnu-gcc"
EM_AARCH64 = 183
"""Machine type of an ELF file for aarch64."""
CORTEX_A72 = "fp asimd evtstrm crc32 cpuid"
NEOVERSE_N1 = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each level, which `prebuilt_library` takes for the libraries of the installation."""
    for level in compilation.LEVELS:
        (tmp_path / f"{level.name}.so").touch()
    monkeypatch.setattr(compilation, "LIBRARIES", tmp_path)
    monkeypatch.setattr(compilation, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return tmp_path


def test_missing_prebuilt_kernels_and_compiler_give_an_explained_reason(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "cpuinfo").write_text(f"flags : {HASWELL}\n")
    monkeypatch.setenv("PATH", str(installed / "nothing"))
    monkeypatch.delenv("CC", raising=False)
    assert compilation.why_unavailable() is None
    for library in installed.glob("*.so"):
        library.unlink()
    reason = compilation.why_unavailable()
    assert reason is not None
    assert reason.startswith("no prebuilt kernels and no C compiler; install gcc or clang")
    monkeypatch.setenv("CC", sys.executable)
    assert compilation.why_unavailable() is None


def test_compilation_of_kernels_has_a_time_limit_only_if_requested(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[sys.argv.index('-o') + 1], 'w')\n")
    compiler.chmod(0o755)
    compilation.compile_library([str(compiler)], (), tmp_path / "kernels.so")
    assert (tmp_path / "kernels.so").exists()
    with pytest.raises(subprocess.TimeoutExpired):
        compilation.compile_library([str(compiler)], (), tmp_path / "other.so", file_seconds=1e-9)


@pytest.mark.parametrize(
    ("machine", "flags", "used"),
    [("x86_64", f"{HASWELL} avx_vnni", "-march=x86-64-v3"), ("riscv64", "", "")],
)
def test_kernels_are_compiled_for_the_fastest_instruction_set_the_compiler_supports(
    installed: Path, monkeypatch: pytest.MonkeyPatch, machine: str, flags: str, used: str
) -> None:
    (installed / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    compiler = installed / "cc"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *=native* | *vnni*) echo "unsupported instruction" >&2; exit 1;; esac\n'
        'echo "$*" >> "$(dirname "$0")/used"\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n'
    )
    compiler.chmod(0o755)
    compilation.compile_for_this_processor(str(compiler), installed / "kernels.so", lambda: None, 60.0)
    assert (installed / "kernels.so").exists()
    compiled = [line for line in (installed / "used").read_text().splitlines() if " -c " in line]
    assert all(f"-Wno-psabi {used} -c".replace("  ", " ") in line for line in compiled)


def test_compiler_error_of_the_first_attempt_is_reported_if_all_attempts_fail(installed: Path) -> None:
    (installed / "cpuinfo").write_text(f"flags : {HASWELL}\n")
    compiler = installed / "cc"
    compiler.write_text('#!/bin/sh\necho "no stdint.h with $*" >&2; exit 1\n')
    compiler.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as error:
        compilation.compile_for_this_processor(str(compiler), installed / "kernels.so", lambda: None, 60.0)
    assert "-march=native" in error.value.stderr


def chosen(folder: Path, *cores: str) -> str | None:
    (folder / "cpuinfo").write_text("\n\n".join(f"processor : 0\nflags\t\t: {flags}" for flags in cores))
    library = compilation.prebuilt_library()
    return library and library.stem


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("fpu sse2", "x86_64"),
        (HASWELL.replace("f16c ", ""), "x86_64"),
        (HASWELL, "x86_64_v3"),
        (f"{HASWELL} avx512f", "x86_64_v3"),
        (f"{HASWELL} avx_vnni", "x86_64_v3_vnni"),
        (SKYLAKE, "x86_64_v4"),
        (f"{SKYLAKE} avx512_vnni avx_vnni", "x86_64_v4_vnni"),
        (f"{SKYLAKE} avx512_bf16", "x86_64_v4"),
        (f"{SKYLAKE} avx512_vnni avx512_bf16", "x86_64_v4_vnni"),
        (f"{SKYLAKE} avx512_vnni avx512_bf16 avx512vbmi", "x86_64_v4_bf16"),
        (f"{SKYLAKE} avx512_vnni avx512_bf16 avx512vbmi amx_tile", "x86_64_v4_bf16"),
        (f"{SKYLAKE} avx512_vnni avx512_bf16 avx512vbmi amx_tile amx_int8", "x86_64_v4_amx"),
    ],
)
def test_fastest_prebuilt_library_that_the_processor_supports_is_chosen(
    installed: Path, flags: str, level: str
) -> None:
    assert chosen(installed, flags, flags) == level


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (CORTEX_A72, "armv8_a"),
        (NEOVERSE_N1, "armv8_2_a_dotprod"),
        (f"{NEOVERSE_N1} i8mm", "armv8_2_a_dotprod"),
        (f"{NEOVERSE_N1} i8mm bf16", "armv8_2_a_i8mm_bf16"),
        (f"{CORTEX_A72} asimddp i8mm bf16", "armv8_a"),
    ],
)
def test_fastest_prebuilt_library_that_the_arm_processor_supports_is_chosen(
    installed: Path, monkeypatch: pytest.MonkeyPatch, features: str, level: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    (installed / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {features}\n")
    library = compilation.prebuilt_library()
    assert library is not None
    assert library.stem == level


def test_prebuilt_library_is_chosen_by_the_instructions_that_all_cores_support(installed: Path) -> None:
    assert chosen(installed, SKYLAKE, HASWELL) == "x86_64_v3"


def test_unknown_processor_uses_the_portable_prebuilt_library(installed: Path) -> None:
    assert compilation.prebuilt_library() == installed / "x86_64.so"


def test_prebuilt_libraries_of_another_machine_type_are_not_used(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert chosen(installed, SKYLAKE) is None


def test_compiler_is_looked_for_if_the_prebuilt_library_cannot_be_loaded(
    installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(kernel_library.Unavailable, match="no C compiler found"):
        kernel_library.native_kernels.__wrapped__()
    assert "prebuilt kernels not loaded path=" in caplog.text


@pytest.mark.nightly
def test_platform_wheel_has_kernels_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds without optimization, because the test checks the contents of the wheel and not its speed."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine: it cannot build a platform wheel")
    quick = tmp_path / "cc"
    quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CC", str(quick))
    monkeypatch.setenv("HELEXA_PREBUILT_KERNELS", "1")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    assert unpack(tmp_path).name.startswith(f"helexa-{helexa.__version__}-py3-none-manylinux_2_")
    monkeypatch.setattr(
        compilation, "LIBRARIES", tmp_path / compilation.LIBRARIES.relative_to(Path(helexa.__file__).parents[1])
    )
    library = compilation.prebuilt_library()
    assert library is not None
    assert {path.stem for path in library.parent.iterdir()} == {
        level.name for level in compilation.LEVELS if level.machine == platform.machine()
    }
    assert KernelLibrary(ctypes.CDLL(str(library)), "", "").formats


@pytest.mark.nightly
def test_cross_compiler_builds_the_wheel_for_aarch64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"no {CROSS_COMPILER} on this machine: it cannot build the wheel for aarch64")
    monkeypatch.setenv("CC", CROSS_COMPILER)
    monkeypatch.setenv("HELEXA_TARGET_MACHINE", "aarch64")
    monkeypatch.setenv("HELEXA_PREBUILT_KERNELS", "1")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=600)
    name = unpack(tmp_path).name
    assert re.fullmatch(rf"helexa-{re.escape(helexa.__version__)}-py3-none-manylinux_2_\d+_aarch64\.whl", name)
    libraries = tmp_path / compilation.LIBRARIES.relative_to(Path(helexa.__file__).parents[1])
    levels = {level.name for level in compilation.LEVELS if level.machine == "aarch64"}
    assert {path.stem for path in libraries.iterdir()} == levels
    header = (libraries / "armv8_a.so").read_bytes()[:20]
    assert (header[:4], int.from_bytes(header[18:20], "little")) == (b"\x7fELF", EM_AARCH64)


def test_installed_wheel_reports_commit_and_time_of_its_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELEXA_BUILD_SHA", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795000000")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    monkeypatch.delenv("HELEXA_BUILD_SHA")
    unpack(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = "from helexa.neuron.hardware.machine_description import build_facts as facts; print(facts()"
    outputs = [
        subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True, timeout=60)
        for code in (
            f"{facts}['git_sha'], facts()['build_timestamp'])",
            "import sys, helexa.cli; sys.argv[1:] = ['--version']; helexa.cli.main()",
        )
    ]
    assert outputs == [
        "0123456 2026-11-18T11:06:40+00:00\n",
        f"helexa {helexa.__version__} (0123456, built 2026-11-18)\n",
    ]


def unpack(folder: Path) -> Path:
    """Unpack the only wheel in `folder` there; return the path of the wheel."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return wheel


def test_cache_name_of_compiled_kernels_changes_with_the_compiler_file(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("no program")
    name = kernel_library._key(str(compiler))
    assert kernel_library._key(str(compiler)) == name
    compiler.write_text("another compiler")
    assert kernel_library._key(str(compiler)) != name
