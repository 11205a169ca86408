"""Measure the time and the memory that an engine needs to load and quantize a bfloat16 checkpoint, as JSON lines.

usage: python perf/quantize.py [--quant q4k] [--runs 3] [--folder FOLDER]

The script uses the checkpoint in FOLDER, or writes a random checkpoint in the shape of Qwen2-1.5B (1.54e9 weights, 3.1
GB) to a temporary folder. It repeats three measurements `--runs` times, without and with the file in the page cache
(cold and warm), if the operating system can drop a file from its page cache:

    buffer      read all bytes of the file, 16 MiB at a time, into one reused buffer
    memory      read all bytes of the file, 16 MiB at a time, into new memory
    load        load the model and compute one token in a new process, as an engine does at its start

Kernels are compiled before the measurements, and no packed weights are cached. Directly before each measurement, the
script touches and frees 8 GiB of memory, or half of the free memory. Otherwise the host of a virtual machine may have
to allocate this memory during the measurement, which can take longer than the load.

The results about memory are:

    peak_mib        peak resident memory of the process during the load, minus its memory before the load
    result_mib      memory of the loaded weights
    layer_mib       size of one layer in the file

The verdicts compare medians. The load may take at most 3 times as long as `memory`. The peak memory may be at
most 1.35 times `result_mib`, plus `layer_mib`.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import torch
from safetensors.torch import save_file
from support.output import print_line, print_verdict

TIME_THRESHOLD, MEMORY_THRESHOLD = 3.0, 1.35
VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 151936, 1536, 8960, 28, 12, 2
CHUNK_BYTES, TOUCHED_BYTES = 16 << 20, 8 << 30


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint with random weights in the shape of Qwen2-1.5B to `folder`."""
    config = {
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    width = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (HIDDEN,), f"{at}.post_attention_layernorm.weight": (HIDDEN,)}
        for name, rows in (("q", HIDDEN), ("k", width), ("v", width)):
            shapes |= {
                f"{at}.self_attn.{name}_proj.weight": (rows, HIDDEN),
                f"{at}.self_attn.{name}_proj.bias": (rows,),
            }
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
        shapes |= {f"{at}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(shape).bfloat16()
        if "norm" in name
        else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def read_seconds(file: Path, *, keep: bool) -> float:
    """Read all bytes of a file and return the duration in seconds.

    Args:
        file: path of the file.
        keep: True to read every block into new memory, False to read all blocks into the same buffer.
    """
    touch_memory()
    size = file.stat().st_size
    buffer = torch.empty(size if keep else CHUNK_BYTES, dtype=torch.uint8).numpy().data
    begin = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        offset = 0
        while count := stream.readinto(buffer[offset : offset + CHUNK_BYTES] if keep else buffer):
            offset += count
            if offset == size:
                break
    return time.perf_counter() - begin


def touch_memory() -> None:
    """Touch and free memory, so that a virtual machine's host allocates this memory before the measurement starts."""
    torch.ones(min(TOUCHED_BYTES, psutil.virtual_memory().available // 2), dtype=torch.uint8)


def forget(file: Path) -> None:
    """Remove a file from the operating system's page cache."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path, quant: str) -> dict[str, float]:
    """Load the checkpoint in a new process with an empty cache folder. Return the measurements of this process."""
    touch_memory()
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--child", str(folder), "--quant", quant]
        offset = subprocess.run(command, env=os.environ | {"HELEXA_CACHE": cache}, stdout=subprocess.PIPE, check=True)
    return json.loads(offset.stdout)


def child(folder: Path, quant: str) -> None:
    """Load the checkpoint and print the measurements. The function `load` runs this function in a new process."""
    from helexa.neuron.engine.ipc.engine_options import EngineOptions
    from helexa.neuron.engine.loading.load import load as load_model
    from helexa.neuron.hardware.cpus import physical_cores
    from helexa.neuron.ops.native.kernel_library import Unavailable, native_kernels

    with contextlib.suppress(Unavailable):
        native_kernels()
    torch.set_num_threads(physical_cores())
    peak_before = peak_mib()
    begin = time.perf_counter()
    loaded = load_model(folder, EngineOptions(quant=quant, kv_cache_mb=64))
    seconds = time.perf_counter() - begin
    figures = {"seconds": seconds, "peak_mib": peak_mib() - peak_before, "result_mib": loaded.ops.step_bytes / 2**20}
    print(json.dumps(figures), flush=True)
    os._exit(0)  # without waiting for writes of packed weights to the disk cache


def peak_mib() -> float:
    """Return the peak resident memory of this process in MiB, and reset the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10
    Path("/proc/self/clear_refs").write_text("5")
    return peak


@contextlib.contextmanager
def checkpoint_in(checkpoint: Path | None) -> Iterator[Path]:
    """Yield the folder `checkpoint`, or a temporary folder if it is None. Write a random checkpoint if none exists."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = checkpoint or Path(temporary)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(folder)
        yield folder


def measure(folder: Path, quant: str, runs: int) -> None:
    """Read the checkpoint's file and load the checkpoint alternately, then print the results."""
    file = folder / "model.safetensors"
    layer = 2 * (2 * HIDDEN * HIDDEN + 2 * KV_HEADS * HIDDEN // HEADS * HIDDEN + 3 * HIDDEN * INTERMEDIATE) / 2**20
    peaks: list[float] = []
    results: list[float] = []
    for state in ("cold", "warm") if hasattr(os, "posix_fadvise") else ("warm",):
        seconds: dict[str, list[float]] = {"buffer": [], "memory": [], "load": []}
        read_seconds(file, keep=False)
        for _ in range(runs):
            for row, values in seconds.items():
                if state == "cold":
                    forget(file)
                if row == "load":
                    figures = load(folder, quant)
                    values.append(figures["seconds"])
                    peaks.append(figures["peak_mib"])
                    results.append(figures["result_mib"])
                else:
                    values.append(read_seconds(file, keep=row == "memory"))
        for row, values in seconds.items():
            print_line(
                row=row,
                cache=state,
                seconds=median(values),
                gb_s=file.stat().st_size / 1e9 / median(values),
                runs=values,
            )
        ratio = median(seconds["load"]) / median(seconds["memory"])
        print_verdict(f"load / read, {state}", ratio, f"<= {TIME_THRESHOLD}", ratio <= TIME_THRESHOLD)
    peak, result = median(peaks), median(results)
    print_line(row="memory", quant=quant, peak_mib=peak, result_mib=result, layer_mib=layer, runs=peaks)
    ratio = (peak - layer) / result
    print_verdict("(peak - layer) / result", ratio, f"<= {MEMORY_THRESHOLD}", ratio <= MEMORY_THRESHOLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", default="q4k")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.quant)
        return
    with checkpoint_in(arguments.folder) as folder:
        measure(folder, arguments.quant, arguments.runs)


if __name__ == "__main__":
    main()
