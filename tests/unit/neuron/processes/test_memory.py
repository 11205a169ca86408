"""Memory on kernels without transparent huge pages, and in sandboxes without anonymous shared memory."""

import errno
import subprocess
import sys

import pytest

# A filter of system calls rejects the advice about huge pages, as the kernel of the Raspberry Pi 5 does, and
# `memfd_create`, as some sandboxes do.
RESTRICTED = """
import ctypes, errno, mmap, os, platform, struct, sys, tempfile
from pathlib import Path

madvise, memfd_create = {"x86_64": (28, 319), "aarch64": (233, 279)}[platform.machine()]
load, equal, result, allow, error = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
rows = [
    (load, 0, 0, 0), (equal, 0, 3, madvise),
    (load, 0, 0, 32), (equal, 3, 0, mmap.MADV_HUGEPAGE), (equal, 2, 1, mmap.MADV_NOHUGEPAGE),
    (equal, 2, 0, memfd_create),
    (result, 0, 0, allow), (result, 0, 0, error | errno.EINVAL), (result, 0, 0, error | int(sys.argv[1])),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
"""

MEMORY = """
from helexa.neuron import tensors
from helexa.neuron.ops.native.kernel_library import native_kernels
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.native.packed_weights import HugeMemory
from helexa.neuron.ops.native.packed_weights_cache import MappedWeights
from helexa.neuron.ops.rank_group_and_shares import SharedMemory
from helexa.neuron.processes.heartbeat import Heartbeat

assert HugeMemory(1 << 20).take(100).tolist() == [0] * 100
cache = NativeOps(native_kernels(), 1).new_cache(2, 3, 64)
assert len(cache) == 3
with tempfile.TemporaryFile() as file:
    file.write(bytes(4 << 20))
    file.flush()
    assert not MappedWeights(file, 4 << 20).move()
assert Heartbeat().count == 0
os.close(SharedMemory.create())
print("works")
"""


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)
def test_memory_can_be_allocated_if_huge_pages_or_memfd_are_unavailable(error: int):
    command = [sys.executable, "-c", RESTRICTED + MEMORY, str(error)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "works\n", done.stderr
