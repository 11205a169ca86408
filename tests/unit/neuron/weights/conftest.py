"""Small model files, written with the reference writers."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

WriteGguf = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> gguf.GGUFReader:
    """Return the SmolLM2 GGUF file, opened with the reference reader; opening takes seconds."""
    return gguf.GGUFReader(smollm2_gguf)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Return `write(architecture, tensors, keys, name)`, which writes a GGUF file and returns its path.

    A tensor given as `(values, type)` is quantized to the type, except uint8 values, which are written unchanged.
    """

    def write(
        architecture: str,
        tensors: dict[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
        keys: Callable[[gguf.GGUFWriter], None] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        if keys is not None:
            keys(writer)
        for tensor, value in (tensors or {}).items():
            if isinstance(value, tuple):
                values, kind = value
                stored = values if values.dtype == np.uint8 else gguf.quants.quantize(values, kind)
                writer.add_tensor(tensor, stored, raw_dtype=kind)
            else:
                writer.add_tensor(tensor, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
