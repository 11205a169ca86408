"""Check a cache folder: write access, content, unfinished downloads and free space."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from helexa.neuron.doctor.check_result import CheckResult

_LITTLE_BYTES = 5 << 30
_UNFINISHED = ".incomplete"


def look_at_folder(folder: Path, content: str) -> Iterator[CheckResult]:
    """Check a cache folder: write access, free disk space, total size of its files and unfinished downloads.

    Args:
        folder: the folder, which may not exist yet.
        content: description of the files in the folder, for the printed text.
    """
    yield _look(folder, content)
    yield from _look_inside(folder)


def _look(folder: Path, content: str) -> CheckResult:
    try:
        present = next(path for path in (folder, *folder.parents) if path.exists())
        writable = present.is_dir() and os.access(present, os.W_OK | os.X_OK)
        free = shutil.disk_usage(present).free
    except OSError:  # the folder is not readable
        writable, free = False, 0
    if not writable:
        return CheckResult("cache", "fault", f"{content} belong in {folder}, which is not writable")
    text = f"{content} are stored in {folder}, {free >> 30} GiB free"
    if free < _LITTLE_BYTES:
        return CheckResult(
            "disk", "note", f"{text}, which is little for models; free space, or choose another folder with [cache] dir"
        )
    return CheckResult("disk", "fine", text)


def _look_inside(folder: Path) -> Iterator[CheckResult]:
    total = unfinished_bytes = unfinished = 0
    for parent, _, names in os.walk(folder, onerror=None):
        for name in names:
            path = Path(parent, name)
            try:
                size = path.lstat().st_blocks * 512
            except OSError:
                continue  # another process has just removed the file
            total += size
            if name.endswith(_UNFINISHED):
                unfinished_bytes, unfinished = unfinished_bytes + size, unfinished + 1
    if total:
        yield CheckResult("cache", "fine", f"{folder} holds {total >> 20} MiB")
    if unfinished:
        text = f"{unfinished} unfinished downloads, {unfinished_bytes >> 20} MiB; each resumes when its model is loaded"
        yield CheckResult("cache", "note", text)
