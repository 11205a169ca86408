"""llama.cpp's own converter and engine, from packages of the Python Package Index. Both run in separate processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import packages

CONVERTER = ("convert_hf_to_gguf.py", "conversion/*", "gguf-py/*")


def convert(model: Path, target: Path, *options: str, kind: str = "f32") -> Path:
    """Convert the Hugging Face folder `model` to the GGUF file `target` with llama.cpp's script.

    Args:
        options: further options of the script.
        kind: type of the matrices in the file: `f32`, `f16` or `bf16`.
    """
    folder = packages.from_sdist(
        "llama-cpp-python==0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "vendor/llama.cpp/",
        "llama.cpp-converter",
        only=CONVERTER,
    )
    command = [sys.executable, str(folder / "convert_hf_to_gguf.py"), str(model)]
    _run([*command, "--outfile", str(target), "--outtype", kind, *options])
    return target


def logits(model: Path, texts: list[list[int]]) -> list[Tensor]:
    """Return llama.cpp's logits after each token of each text, float32 [T, vocabulary]. Keys and values are float32."""
    library = packages.from_wheel(
        "xllamacpp==2026.10.11549",  # its library exports llama.cpp's functions
        "/xllamacpp.abi3.so",
        "78dcbbfcc861ee3377554325dc12864829a76ec3de6f1882886d4a82a2def7f5",
        "xllamacpp-2026.10.11549.so",
    )
    script, out = Path(__file__).with_name("llama_cpp_logits.py"), model.with_suffix(".npz")
    _run([sys.executable, str(script), str(library), str(model), str(out)], json.dumps(texts))
    with np.load(out) as arrays:
        return [torch.from_numpy(array) for array in arrays.values()]


def _run(command: list[str], text: str = "") -> None:
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}  # a backtrace would need a debugger
    done = subprocess.run(
        command, input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:]
