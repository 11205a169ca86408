"""The packed weights cache on disk: matrices are read back unchanged, and invalid files are ignored."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import helexa
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.ops.native import packed_weights_cache
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.packed_weights import HugeMemory, PackedMatrix, pack
from helexa.neuron.ops.native.packed_weights_cache import MappedWeights, PackedStore, fingerprint
from neuron.ops import random_weights

SHAPES = {"Q4_1": (48, 64), "Q6_K": (20, 512), "bfloat16": (17, 32), "IQ4_XS": (20, 256)}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights_cache, "_SMALLEST", 0)
    monkeypatch.setattr(packed_weights_cache, "_RESERVED", 0)
    monkeypatch.setattr(packed_weights_cache, "_MOVE_AFTER_SECONDS", 0)


@pytest.fixture
def matrices(library: KernelLibrary) -> dict[str, PackedMatrix]:
    torch.manual_seed(0)
    memory = HugeMemory(1 << 20)
    return {kind: pack(library, random_weights.make(kind, *shape), memory) for kind, shape in SHAPES.items()}


def saved(
    library: KernelLibrary, folder: Path, matrices: dict[str, PackedMatrix], key: str = "model", version: str = ""
) -> Path:
    """Save these matrices in a new store and return its file."""
    previous = set(folder.glob("*"))
    store = PackedStore(library, folder, key, version=version)
    for name, matrix in matrices.items():
        store.add(name, matrix)
    thread = store.finish()
    assert thread is not None
    thread.join()
    (path,) = set(folder.glob("*")) - previous
    return path


def saved_again(store: PackedStore, folder: Path) -> bool:
    """Return whether `finish` changes the files."""
    before = {path: path.stat().st_ino for path in folder.iterdir()}
    if thread := store.finish():
        thread.join()
    return before != {path: path.stat().st_ino for path in folder.iterdir()}


def test_packed_matrices_saved_in_the_cache_are_read_back(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix]
) -> None:
    saved(library, tmp_path, matrices)
    store = PackedStore(library, tmp_path, "model")
    for name, matrix in matrices.items():
        loaded = store.get(name, SHAPES[name])
        assert loaded is not None
        assert torch.equal(loaded.data, matrix.data)
        assert loaded.number == matrix.number
    assert store.get("Q4_1", (48, 96)) is None
    assert store.get("Q5_K", (48, 64)) is None
    assert not saved_again(store, tmp_path)


class Truncating:
    """Kernels during whose use another program truncates a file."""

    def __init__(self, library: KernelLibrary, path: Path) -> None:
        self._library, self._path = library, path

    def packed_bytes(self, number: int | None, outputs: int, columns: int) -> int:
        os.truncate(self._path, 4096)
        return self._library.packed_bytes(number, outputs, columns)


def test_cache_file_truncated_while_it_is_mapped_is_not_used(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix]
) -> None:
    """A read of the lost pages would end the engine by SIGBUS."""
    path = saved(library, tmp_path, matrices)
    assert path.stat().st_size > 8192
    store = PackedStore(Truncating(library, path), tmp_path, "model")  # pyright: ignore[reportArgumentType]
    assert all(store.get(name, SHAPES[name]) is None for name in matrices)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no mremap")
def test_partial_cache_file_of_another_engine_is_neither_used_nor_deleted(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix]
) -> None:
    # Engines in two containers may have the same process id.
    saved(library, tmp_path, matrices)
    (path,) = tmp_path.iterdir()
    path.unlink()
    other = path.with_suffix(f".partial-{os.getpid()}")
    other.write_bytes(b"other")
    assert saved(library, tmp_path, matrices) == path
    assert other.read_bytes() == b"other"


def test_mapped_weights_stay_readable_while_they_move_to_anonymous_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights_cache, "_PART", 4 << 20)
    content = np.random.default_rng(0).integers(0, 256, (11 << 20) + 12345, np.uint8)
    (tmp_path / "weights").write_bytes(content.tobytes())
    with (tmp_path / "weights").open("rb") as file:
        mapped = MappedWeights(file, len(content))
    mapped.populate()
    ended, reads, differs = threading.Event(), 0, False

    def read() -> None:
        nonlocal reads, differs
        while not ended.is_set() or not reads:
            differs |= not np.array_equal(np.asarray(mapped.data), content)
            reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert mapped.move()
    finally:
        ended.set()
        reader.join()
    assert not differs
    assert np.array_equal(np.asarray(mapped.data), content)
    in_file = sum(
        int(fields[0], 16) - int(start, 16)
        for start, _, rest in (line.partition("-") for line in Path("/proc/self/maps").read_text().splitlines())
        if (fields := rest.split())[-1] == str(tmp_path / "weights")
    )
    assert in_file < 4 << 20, "less than one huge page at each end"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no mremap")
def test_mapped_embedding_is_read_from_disk_only_when_rows_are_needed(tmp_path: Path) -> None:
    path, size = tmp_path / "weights", 32 << 20
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path.write_bytes(content.tobytes())
    with path.open("rb") as file:
        mapped = MappedWeights(file, size)
    mapped.leave([mapped.data[8 << 20 : 24 << 20]])
    mapped.populate()
    assert _resident(path) == size // 2
    assert mapped.move()
    assert _resident(path) < 8 << 20, "less than one huge page at each end of both parts"
    assert np.array_equal(np.asarray(mapped.data), content)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no mremap")
def test_reading_a_row_of_a_mapped_embedding_loads_only_the_blocks_around_it(
    tmp_path: Path, library: KernelLibrary
) -> None:
    embedding = pack(library, random_weights.make("Q8_0", 40_000, 256), HugeMemory(1 << 20))
    other = pack(library, random_weights.make("Q8_0", 4000, 256), HugeMemory(1 << 20))
    store = PackedStore(library, tmp_path, "model")
    store.add("embedding", embedding)
    store.add("other", other)
    thread = store.finish([embedding])
    assert thread is not None
    thread.join()
    stored = PackedStore(library, tmp_path, "model").get("embedding", (40_000, 256))
    assert stored is not None
    (path,) = tmp_path.iterdir()
    before = _resident(path)
    assert torch.equal(stored.data[5 << 20 : 6 << 20], embedding.data[5 << 20 : 6 << 20])
    assert _resident(path) - before < 3 << 19, "no more than the part that is read and the blocks at its ends"


def _resident(path: Path) -> int:
    """Return the bytes of the mapped file that this process has in memory."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0]:
            inside = fields[-1] == str(path)
        elif inside and fields[0] == "Rss:":
            resident += int(fields[1]) << 10
    return resident


def test_packed_weight_cache_misses_for_another_model_or_weight_layout(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix]
) -> None:
    saved(library, tmp_path, matrices)
    assert PackedStore(library, tmp_path, "other").get("Q4_1", SHAPES["Q4_1"]) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:10],
        lambda data: b"[1, 2]\n" + data,
        lambda data: b'{"Q4_1": [0, 48, 64]}\n' + data,
        lambda data: b'{"Q4_1": [-64, 48, 64, 1]}\n' + bytes(4096),
        lambda data: b'{"Q4_1": [0, 4800000, 64000000, 1]}\n' + bytes(4096),
        lambda data: b'{"Q4_1": [0, 48, 64, 99]}\n' + bytes(4096),
        lambda data: b'{"Q4_1": [0, 48, 65, 1]}\n' + bytes(4096),
    ],
)
def test_damaged_cache_file_is_ignored(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix], damage: object
) -> None:
    path = saved(library, tmp_path, matrices)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert PackedStore(library, tmp_path, "model").get("Q4_1", SHAPES["Q4_1"]) is None


def test_damaged_cache_file_is_replaced(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix]
) -> None:
    path = saved(library, tmp_path, matrices)
    os.truncate(path, path.stat().st_size // 2)
    store = PackedStore(library, tmp_path, "model")
    for name, matrix in matrices.items():
        store.add(name, matrix)
    assert saved_again(store, tmp_path)
    assert PackedStore(library, tmp_path, "model").get("Q4_1", SHAPES["Q4_1"]) is not None


def test_least_recently_used_cache_file_is_evicted(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = saved(library, tmp_path, matrices, "first")
    second = saved(library, tmp_path, matrices, "second")
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    PackedStore(library, tmp_path, "first")  # marks the file as used
    monkeypatch.setattr(packed_weights_cache, "_LIMIT", int(first.stat().st_size * 2.5))
    third = saved(library, tmp_path, matrices, "third")
    assert set(tmp_path.iterdir()) == {first, third}


def test_cache_file_that_an_engine_has_mapped_is_neither_removed_nor_replaced(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = PackedStore(library, tmp_path, "first")  # an engine that starts without a file, and packs
    first = saved(library, tmp_path, matrices, "first")
    assert PackedStore(library, tmp_path, "first").get("Q4_1", SHAPES["Q4_1"]) is not None
    for name, matrix in matrices.items():
        waiting.add(name, matrix)
    assert not saved_again(waiting, tmp_path)
    second = saved(library, tmp_path, matrices, "second")
    os.utime(first, (1, 1))
    monkeypatch.setattr(packed_weights_cache, "_LIMIT", int(first.stat().st_size * 2.5))
    third = saved(library, tmp_path, matrices, "third")
    assert set(tmp_path.iterdir()) == {first, third} and not second.exists()


def test_cache_file_of_another_version_of_the_model_is_removed_before_other_models(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    old = saved(library, tmp_path, matrices, "first", "1")
    other = saved(library, tmp_path, matrices, "second", "1")
    os.utime(old, (now, now - 60))
    os.utime(other, (now, now - 3600))
    monkeypatch.setattr(packed_weights_cache, "_LIMIT", int(old.stat().st_size * 2.5))
    new = saved(library, tmp_path, matrices, "first", "2")
    assert set(tmp_path.iterdir()) == {other, new}


def test_cache_files_unused_for_more_than_30_days_are_removed(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix]
) -> None:
    now, day = time.time(), 86400
    ages = {("first", "1"): 2, ("first", "2"): 1, ("second", "1"): 31, ("third", "1"): 29}
    paths = {key: saved(library, tmp_path, matrices, *key) for key in ages}
    (tmp_path / f"{'0' * 40}.tiles").touch()  # of an earlier release
    os.utime(tmp_path / f"{'0' * 40}.tiles", (1, 1))
    for key, days in ages.items():
        os.utime(paths[key], (now, now - days * day))
    new = saved(library, tmp_path, matrices, "fourth")
    assert set(tmp_path.iterdir()) == {paths["first", "2"], paths["third", "1"], new}


def test_cache_files_take_at_most_a_tenth_of_the_disk_or_one_file(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=1000)
    monkeypatch.setattr(packed_weights_cache.shutil, "disk_usage", lambda path: usage)
    saved(library, tmp_path, matrices, "first").unlink()
    first = saved(library, tmp_path, matrices, "first")
    store = PackedStore(library, tmp_path, "second")
    for name, matrix in matrices.items():
        store.add(name, matrix)
    thread = store.finish()
    assert thread is not None
    thread.join()
    assert len(list(tmp_path.iterdir())) == 1 and not first.exists()


def test_cache_on_a_disk_without_enough_space_saves_nothing(
    library: KernelLibrary, tmp_path: Path, matrices: dict[str, PackedMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights_cache, "_LIMIT", 100)
    store = PackedStore(library, tmp_path, "model")
    for name, matrix in matrices.items():
        store.add(name, matrix)
    thread = store.finish()
    assert thread is not None
    thread.join()
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import sys
from pathlib import Path
import torch
from helexa.neuron.ops.native import packed_weights_cache
from helexa.neuron.ops.native.kernel_library import native_kernels
from helexa.neuron.ops.native.native_ops import NativeOps
packed_weights_cache._SMALLEST = packed_weights_cache._RESERVED = 0
ops = NativeOps(native_kernels(), 1)
store = ops.store(Path(sys.argv[1]))
print(store.get("weight", (32, 64)) is not None)
store.add("weight", ops.matrix(torch.ones(32, 64)))
if thread := store.finish():
    thread.join()
"""


def test_cached_weights_packed_by_other_loading_code_are_ignored(tmp_path: Path, library: KernelLibrary) -> None:
    """Run a copy of the package before and after a change to a module that permutes tensors."""
    package = tmp_path / "source" / "helexa"
    shutil.copytree(Path(helexa.__path__[0]), package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(cache_root(None) / "kernels")  # to avoid compiling them again
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    environment = os.environ | {"PYTHONPATH": str(package.parent), "HELEXA_CACHE": str(cache)}

    def packed_weights_are_used() -> bool:
        command = [sys.executable, "-c", SCRIPT, str(model)]
        run = subprocess.run(command, env=environment, capture_output=True, check=True)
        return run.stdout.strip() == b"True"

    assert not packed_weights_are_used()
    assert packed_weights_are_used()
    layout = package / "neuron" / "weights" / "gguf" / "layout.py"
    layout.write_text(layout.read_text() + "\n# another permutation\n")
    assert not packed_weights_are_used()


def test_fingerprint_of_a_model_changes_with_file_contents_and_names(tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    model.write_bytes(os.urandom(100_000))
    first = fingerprint(model)
    assert fingerprint(model) == first
    status = model.stat()
    data = bytearray(model.read_bytes())
    data[10] ^= 1
    model.write_bytes(data)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint(model) != first
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    without_weights = fingerprint(folder)
    (folder / "model.safetensors").write_bytes(b"1")
    assert fingerprint(folder) != without_weights
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"x" * 100)
    unchanged = fingerprint(parts[0])
    parts[1].write_bytes(b"y" * 100)
    assert fingerprint(parts[0]) != unchanged
