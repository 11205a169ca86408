"""Image files are decoded in sandbox processes, which hostile files can end and whose results are in shared memory."""

import os
import random
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

import nightly
from helexa.neuron.vision import model_vision
from helexa.neuron.vision.decode import ImageLimits
from helexa.neuron.vision.image_tokens_and_errors import ImageError
from helexa.neuron.vision.model_vision import ImageSandbox
from helexa.neuron.vision.processor_choice import ImageProcessor, image_processor, prepare
from neuron.vision.images import encoded, noise

LIMITS = ImageLimits()
QWEN = image_processor({"model_type": "qwen3_5", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}, {})
GEMMA = image_processor({"model_type": "gemma3", "vision_config": {"image_size": 224, "patch_size": 14}}, {})
IDEFICS = image_processor({"model_type": "idefics3", "vision_config": {"image_size": 364, "patch_size": 14}}, {})


@pytest.fixture
def sandbox() -> Iterator[ImageSandbox]:
    sandbox = ImageSandbox(LIMITS)
    yield sandbox
    sandbox.close()


def memories() -> int:
    """Return the number of descriptors of shared pixels that this process has open."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            targets.append(str(descriptor.readlink()))
    return sum("helexa-pixels" in target for target in targets)


@pytest.mark.parametrize("processor", [QWEN, GEMMA, IDEFICS], ids=lambda processor: type(processor).__name__)
def test_image_prepared_in_the_sandbox_equals_an_image_prepared_in_process(
    sandbox: ImageSandbox, processor: ImageProcessor
) -> None:
    for size in ((300, 200), (1, 1), (900, 1700)):
        data = encoded(noise(*size))
        shared = sandbox.prepare(data, processor, 1024)
        expected = prepare(data, processor, LIMITS, 1024, lambda shape: np.empty(shape, np.float32))
        assert np.array_equal(shared.pixels.array(), expected.pixels)
        shared.pixels.close()
        assert (shared.layout, shared.digest) == (expected.layout, expected.digest)
    assert memories() == 0


def test_pixels_prepared_in_the_sandbox_can_be_mapped_by_another_process(sandbox: ImageSandbox) -> None:
    image = sandbox.prepare(encoded(noise(64, 64)), QWEN, 64)
    script = (
        "from helexa.neuron.vision.shared_pixels import pixel_array; import sys;"
        "print(float(pixel_array(int(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]))).sum()))"
    )
    command = [sys.executable, "-c", script, *map(str, (image.pixels.descriptor, *image.pixels.shape))]
    run = subprocess.run(command, pass_fds=[image.pixels.descriptor], capture_output=True, text=True, check=True)
    assert float(run.stdout) == float(image.pixels.array().sum())
    image.pixels.close()


def test_size_of_the_shared_pixel_memory_cannot_be_changed(sandbox: ImageSandbox) -> None:
    image = sandbox.prepare(encoded(noise(64, 64)), QWEN, 64)
    for size in (0, 1 << 40):
        with pytest.raises(PermissionError):
            os.ftruncate(image.pixels.descriptor, size)
    image.pixels.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"text", "its format is not PNG, JPEG, WebP or GIF"),
        (encoded(noise(1, 300)), "one side may be at most 200 times as long"),
        (encoded(noise(50, 50))[:500], "the image is damaged"),
        (bytes(LIMITS.max_bytes + 1), f"the image has {LIMITS.max_bytes + 1} bytes"),
    ],
)
def test_unusable_image_file_is_an_error_and_leaves_the_sandbox_process_running(
    sandbox: ImageSandbox, data: bytes, message: str
) -> None:
    sandbox.prepare(encoded(noise(8, 8)), QWEN, 64).pixels.close()
    before = _processes()
    with pytest.raises(ImageError, match=message):
        sandbox.prepare(data, QWEN, 64)
    assert _processes() == before
    assert memories() == 0


def test_image_that_takes_too_long_ends_its_sandbox_process(
    sandbox: ImageSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _blank(8000, 8000)
    monkeypatch.setattr(model_vision, "MAX_SECONDS", 0.05)
    with pytest.raises(ImageError, match="the image cannot be decoded: the sandbox process runs for too long"):
        sandbox.prepare(data, QWEN, 1024)
    monkeypatch.undo()
    image = sandbox.prepare(data, QWEN, 1024)
    image.pixels.close()
    assert image.layout.tokens <= 1024


def test_image_that_needs_too_much_memory_ends_its_sandbox_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few kilobytes that claims 10 gigapixels, with limits that admit it."""
    monkeypatch.setattr(model_vision, "MAX_SECONDS", 300.0)  # a slow machine fills the memory after the time limit
    sandbox = ImageSandbox(ImageLimits(max_pixels=1 << 40))
    try:
        with pytest.raises(ImageError, match="the image cannot be decoded: the sandbox process needs too much memory"):
            sandbox.prepare(_blank(100_000, 100_000), QWEN, 64)
        sandbox.prepare(encoded(noise(8, 8)), QWEN, 64).pixels.close()
    finally:
        sandbox.close()
    assert memories() == 0


def test_largest_allowed_image_is_prepared_within_the_sandbox_bounds(sandbox: ImageSandbox) -> None:
    image = sandbox.prepare(_blank(8192, 8192), QWEN, 256)
    image.pixels.close()
    assert image.layout.tokens == 256


def test_killed_image_sandbox_process_is_replaced(sandbox: ImageSandbox) -> None:
    existing = _processes()
    sandbox.prepare(encoded(noise(8, 8)), QWEN, 64).pixels.close()
    (process,) = _processes() - existing
    process.kill()
    process.wait()
    sandbox.prepare(encoded(noise(8, 8)), QWEN, 64).pixels.close()
    sandbox.close()
    assert _processes() == existing


def test_many_threads_share_two_image_sandbox_processes(sandbox: ImageSandbox) -> None:
    existing = _processes()
    digests: dict[int, bytes] = {}

    def run(number: int) -> None:
        image = sandbox.prepare(encoded(noise(100, 80, seed=number % 4)), QWEN, 64)
        image.pixels.close()
        digests[number] = image.digest

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 12
    assert len(set(digests.values())) == 4
    assert len(_processes() - existing) <= 2


def test_mutated_image_files_yield_pixels_or_an_error(sandbox: ImageSandbox) -> None:
    """Random changes of valid files never end a sandbox process, and do not let its memory grow."""
    files = [
        encoded(noise(90, 70, mode), file_format, **options)
        for mode, file_format, options in (
            ("RGB", "PNG", {}),
            ("RGBA", "PNG", {}),
            ("L", "PNG", {}),
            ("RGB", "JPEG", {}),
            ("RGB", "JPEG", {"progressive": True}),
            ("CMYK", "JPEG", {}),
            ("RGB", "WEBP", {}),
            ("RGBA", "WEBP", {"lossless": True}),
            ("RGB", "GIF", {}),
            ("RGB", "GIF", {"save_all": True, "append_images": [noise(90, 70, seed=1)]}),
        )
    ]
    generator = random.Random(1)
    outcomes = {"pixels": 0, "error": 0}
    warm: dict[psutil.Process, int] = {}
    for case in range(nightly.cases(1000, 10_000)):
        data = _mutated(generator.choice(files), generator)
        try:
            image = sandbox.prepare(data, generator.choice((QWEN, GEMMA, IDEFICS)), generator.choice((1, 64, 256)))
        except ImageError as error:
            assert "\n" not in str(error)
            assert not str(error).startswith("the image cannot be decoded"), data.hex()
            outcomes["error"] += 1
        else:
            assert np.isfinite(image.pixels.array()).all()
            image.pixels.close()
            outcomes["pixels"] += 1
        if case == 100:
            warm = {process: process.memory_info().rss for process in _processes()}
    assert min(outcomes.values()) > 50, outcomes
    assert _processes() == set(warm), "a process ended"
    for process, resident in warm.items():
        assert process.memory_info().rss < resident + (64 << 20)
    assert memories() == 0


def _mutated(data: bytes, generator: random.Random) -> bytes:
    """Return `data` with a few random changes: bits, bytes, removed, repeated and inserted parts."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 5))):
        place = generator.randrange(len(changed)) if generator.random() < 0.6 else generator.randrange(64)
        place = min(place, len(changed) - 1)
        match generator.randrange(6):
            case 0:
                changed[place] ^= 1 << generator.randrange(8)
            case 1:
                changed[place] = generator.choice((0, 1, 127, 128, 255))
            case 2:
                del changed[place : place + generator.choice((1, 4, 100))]
            case 3:
                changed[place:place] = changed[place : place + generator.choice((1, 4, 100))]
            case 4:
                changed[place : place + 4] = generator.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
            case 5:
                del changed[max(place, 1) :]
        if not changed:
            return b"\0"
    return bytes(changed)


def _blank(width: int, height: int) -> bytes:
    """Return a small PNG file of black pixels, with one bit per pixel."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    packer = zlib.compressobj(1)
    row = bytes(1 + -(-width // 8))
    rows = b"".join(packer.compress(row) for _ in range(min(height, 10_000))) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _processes() -> set[psutil.Process]:
    """Return the sandbox processes that this process started."""
    processes = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "helexa.neuron.vision.image_process" in child.cmdline():
                processes.add(child)
    return processes
