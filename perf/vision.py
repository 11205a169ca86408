"""Measure how long a vision tower takes to encode an image, beside transformers and llama.cpp, as JSON lines.

usage: python perf/vision.py [--side 448] [--rounds 5] [--text MODEL --llama-cpp PYTHON]

The tower has the shape of Qwen3.5-0.8B's (12 layers, hidden size 768) and random weights. transformers computes in
bfloat16. For llama.cpp, MODEL is a GGUF file of a text model, to whose hidden size the tower projects, and PYTHON is a
Python interpreter with llama-cpp-python; its tower has bfloat16 matrices (`mmproj-BF16`), or those of `--mmproj-type`.

The engines encode the same image in turn. One line per engine has the median and the range of its seconds, and the
largest error of its embeddings as a share of the largest value of transformers in float32. `helexa q8_0` is helexa's
tower beside a text model that is quantized at load. The last lines have helexa's share of the measured throughput of
matrix products, and the ratios of the engines' seconds to helexa's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import gguf
import numpy as np
import torch
from support.output import print_line
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from helexa.neuron.layers.loader import Loader
from helexa.neuron.models.vision import tower_class
from helexa.neuron.ops.kernel_selection import select_kernels
from helexa.neuron.vision.decode import ImageLimits
from helexa.neuron.vision.processor_choice import PreparedImage, image_processor, prepare
from helexa.neuron.weights.quantization_formats import VisionQuantPolicy
from helexa.neuron.weights.vision_checkpoint import open_vision_checkpoint

sys.path.extend(str(Path(__file__).parent.parent / "tests" / part) for part in ("", "unit", "integration"))
from neuron.vision.images import encoded, noise
from reference.hf_to_mmproj import write_mmproj

TOWER = {
    "depth": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "num_position_embeddings": 2304,
}
PREPROCESSOR = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}

Encode = Callable[[], float]
"""Encodes the image, and returns the seconds."""


def random_model(folder: Path, hidden: int) -> PreTrainedModel:
    """Write a model with the tower and a tiny text part of size `hidden` to `folder` in bfloat16, and return it."""
    torch.manual_seed(0)
    text = {"hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = Qwen3_5Config(vision_config=TOWER | {"out_hidden_size": hidden}, text_config=text)
    model = Qwen3_5ForConditionalGeneration(config).eval().bfloat16()
    model.save_pretrained(folder)
    return model


def helexa_tower(folder: Path, image: PreparedImage, quant: str) -> tuple[Encode, Callable[[], Tensor]]:
    """Return helexa's tower with the default kernels of this machine; `quant` as for the model of a node."""
    checkpoint = open_vision_checkpoint(folder)
    assert checkpoint is not None
    with checkpoint:
        ops = select_kernels(torch.device("cpu"), None, checkpoint.config).ops
        loader = Loader(checkpoint, ops, lambda done: None, policy=VisionQuantPolicy(quant))
        tower = tower_class(checkpoint.config["model_type"])(checkpoint.config, loader)
    pixels = torch.from_numpy(image.pixels)

    def embeddings() -> Tensor:
        with torch.inference_mode():
            return tower.encode(pixels, image.layout).embeddings

    return timed(embeddings), embeddings


def transformers_tower(model: PreTrainedModel, image: PreparedImage) -> tuple[Encode, Callable[[], Tensor]]:
    """Return the tower of transformers in the dtype of `model`."""
    patches = torch.from_numpy(image.pixels).unflatten(1, (3, 1, -1))
    pixels = patches.expand(-1, -1, 2, -1).flatten(1).to(model.dtype)  # both frames of a time step
    grid = torch.tensor([(1, *image.layout.tiles[0])])

    def embeddings() -> Tensor:
        with torch.inference_mode():
            return model.model.get_image_features(pixels, image_grid_thw=grid, return_dict=True).pooler_output[0]

    return timed(embeddings), embeddings


def timed(encode: Callable[[], Tensor]) -> Encode:
    """Return a function that calls `encode` and returns the seconds."""

    def seconds() -> float:
        started = time.perf_counter()
        encode()
        return time.perf_counter() - started

    return seconds


class LlamaCpp:
    """The vision part of llama.cpp in a process of its own (see `peers/vision_llama_cpp.py`)."""

    def __init__(self, python: str, text: str, mmproj: Path, rgb: Path, side: int) -> None:
        self._embeddings = mmproj.with_suffix(".f32")
        script = Path(__file__).parent / "peers" / "vision_llama_cpp.py"
        command = [python, script, text, mmproj, rgb, str(side), "--threads", str(torch.get_num_threads())]
        self._process = subprocess.Popen(
            [*command, "--embeddings", self._embeddings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.tokens = int(self._line()["tokens"])

    def encode(self) -> float:
        """Encode the image, and return the seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()["seconds"]

    def close(self) -> Tensor:
        """End the process, and return its embeddings, float32 [tokens, width]."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        return torch.from_numpy(np.fromfile(self._embeddings, np.float32)).view(self.tokens, -1)

    def _line(self) -> dict[str, float]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("llama.cpp failed; run perf/peers/vision_llama_cpp.py alone to see why")
        return json.loads(line)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error of the embeddings as a share of the largest expected value."""
    return float((actual.float() - expected).abs().max() / expected.abs().max())


def operations(patches: int, hidden: int) -> float:
    """Return the number of multiplications and additions to encode an image."""
    size, intermediate = TOWER["hidden_size"], TOWER["intermediate_size"]
    layer = 4 * size**2 + 2 * size * intermediate + 2 * patches * size
    merger = (4 * size) ** 2 + 4 * size * hidden
    return 2.0 * patches * (TOWER["depth"] * layer + 1536 * size + merger / 4)


def matrix_rate() -> float:
    """Return the highest measured rate of bfloat16 matrix products of torch, in operations per second."""
    left, right = (torch.randn(2048, 2048, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * 2048**3 / min(timed(lambda: left @ right)() for _ in range(5))


def main() -> None:
    """Measure all engines in turn, and print the results."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--side", type=int, default=448, help="width and height of the image in pixels")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--text", help="GGUF file of a text model for llama.cpp")
    arguments.add_argument("--llama-cpp", metavar="PYTHON")
    arguments.add_argument("--mmproj-type", default="BF16", help="type of the matrices of llama.cpp's tower")
    options = arguments.parse_args()
    if options.side < 256 or options.side % 32:
        arguments.error("--side must be a multiple of 32, and at least 256, so that no engine resizes the image")
    hidden = 1024
    if options.text:
        fields = gguf.GGUFReader(options.text).fields
        hidden = int(fields[f"{fields['general.architecture'].contents()}.embedding_length"].contents())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_model(folder, hidden)
        picture = noise(options.side, options.side)
        checkpoint = open_vision_checkpoint(folder)
        assert checkpoint is not None
        with checkpoint:
            processor = image_processor(checkpoint.config, PREPROCESSOR)
        image = prepare(encoded(picture), processor, ImageLimits(), 1 << 20, lambda shape: np.empty(shape, np.float32))
        towers = {
            "helexa": helexa_tower(folder, image, ""),
            "helexa q8_0": helexa_tower(folder, image, "q8_0"),
            "transformers bfloat16": transformers_tower(model, image),
        }
        encoders = {engine: tower[0] for engine, tower in towers.items()}
        embeddings = {engine: tower[1]() for engine, tower in towers.items()}
        expected = transformers_tower(model.float(), image)[1]()
        peer = None
        if options.llama_cpp:
            mmproj, rgb = folder / "mmproj.gguf", folder / "rgb"
            write_mmproj(mmproj, model, gguf.GGMLQuantizationType[options.mmproj_type])
            rgb.write_bytes(picture.tobytes())
            peer = LlamaCpp(options.llama_cpp, options.text, mmproj, rgb, options.side)
            encoders["llama.cpp"] = peer.encode
        model.bfloat16()
        for encode in encoders.values():
            encode()
        seconds: dict[str, list[float]] = {engine: [] for engine in encoders}
        rates: list[float] = []
        for _ in range(options.rounds):
            rates.append(matrix_rate())
            for engine, encode in encoders.items():
                seconds[engine].append(encode())
        if peer is not None:
            embeddings["llama.cpp"] = peer.close()
    for engine, values in seconds.items():
        print_line(
            engine=engine,
            seconds=median(values),
            fastest=min(values),
            slowest=max(values),
            error=error(embeddings[engine], expected),
        )
    work = operations(image.layout.patches, hidden)
    print_line(operations=work, matrix_rate=median(rates), share=work / median(seconds["helexa"]) / median(rates))
    for engine in list(seconds)[2:]:
        pairs = zip(seconds["helexa"], seconds[engine], strict=True)
        print_line(ratio=engine, value=median(theirs / ours for ours, theirs in pairs))


if __name__ == "__main__":
    main()
