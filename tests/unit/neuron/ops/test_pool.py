"""The thread pool of the kernels by itself, in C programs: its figures, and many graphs beside busy threads.

For longer runs, `HELEXA_POOL_GRAPHS` sets the number of graphs of each stress test.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from helexa.neuron.ops.native.compilation import KERNELS
from nightly import cases

SOURCES = Path(__file__).with_name("pool")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
FLAGS = ("-std=gnu11", "-g", "-pthread", "-Wall", "-Wextra", "-Werror")
COMPILE_SECONDS = 120
HANG_SECONDS = 120  # without a finished graph
STRESS_SECONDS = 6 * 3600  # the program itself ends after HANG_SECONDS without a finished graph

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine: plain torch serves")


def compiled(program: str, folder: Path, *flags: str) -> Path | None:
    """Compile the test program `program`, and return its path; None if the compiler cannot link with `flags`."""
    path = folder / program
    command = [str(COMPILER), *FLAGS, *flags, f"-I{KERNELS}", str(SOURCES / f"{program}.c"), "-o", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if run.returncode and flags and "tsan" in run.stderr:
        return None
    assert run.returncode == 0, run.stderr
    return path


@pytest.fixture(scope="module", params=[(), ("-fsanitize=thread",)], ids=["plain", "thread sanitizer"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled test programs."""
    path = tmp_path_factory.mktemp("pool")
    for program in ("cases", "stress"):
        if compiled(program, path, "-O1", *request.param) is None:
            pytest.skip("the compiler has no ThreadSanitizer")
    return path


@pytest.mark.parametrize(
    "case",
    [
        "foreign_times",
        "late_sleeper",
        "foreign_delay",
        "lost_core",
        "least_threads",
        "empty_graphs",
        "more_threads",
        "slow_attempts",
        "reductions_in_a_row",
    ],
)
def test_thread_pool_uses_times_measured_for_a_graph_only_for_that_graph(folder: Path, case: str) -> None:
    """`pool/cases.c` describes each case."""
    run = subprocess.run([folder / "cases", case], capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_forked_child_process_can_run_graphs(tmp_path: Path) -> None:
    """ThreadSanitizer does not support threads after a fork, so this case runs without it."""
    program = compiled("cases", tmp_path)
    assert program is not None
    run = subprocess.run([program, "forked"], capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("threads", "graphs"),
    [
        (2, cases(5_000, 2_000_000, "HELEXA_POOL_GRAPHS")),
        (4, cases(1_000, 400_000, "HELEXA_POOL_GRAPHS")),
        (8, cases(200, 50_000, "HELEXA_POOL_GRAPHS")),
    ],
)
def test_random_graphs_end_with_correct_results_beside_busy_threads(folder: Path, threads: int, graphs: int) -> None:
    """Four busy threads per thread of the pool compete for the cores."""
    command = [folder / "stress", *map(str, (graphs, threads, 4 * threads, 1, HANG_SECONDS))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=STRESS_SECONDS, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"{graphs} graphs in ")
