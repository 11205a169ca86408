"""Encode an image with the vision part of llama.cpp (libmtmd) once per line of the standard input, as JSON lines.

usage: PYTHON perf/peers/vision_llama_cpp.py MODEL MMPROJ PIXELS SIDE [--threads 2] [--embeddings FILE]

PYTHON is a Python interpreter with llama-cpp-python. MODEL and MMPROJ are GGUF files. PIXELS is a file with SIDE x SIDE
RGB bytes. Each output line has the seconds of one call of `mtmd_encode_chunk`. FILE gets the embeddings, float32.
"""

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp as llama  # pyright: ignore[reportMissingImports]  # PYTHON has it
import llama_cpp.mtmd_cpp as mtmd  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Load the model, tokenize the image, and encode it as often as the standard input has lines."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model")
    arguments.add_argument("mmproj")
    arguments.add_argument("pixels", type=Path)
    arguments.add_argument("side", type=int)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--embeddings", type=Path)
    options = arguments.parse_args()

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(options.model.encode(), llama.llama_model_default_params())
    settings = mtmd.mtmd_context_params_default()
    settings.use_gpu, settings.n_threads, settings.warmup = False, options.threads, False
    context = mtmd.mtmd_init_from_file(options.mmproj.encode(), model, settings)
    if not context:
        raise SystemExit(f"llama.cpp cannot load {options.mmproj}")
    rgb = (ctypes.c_uint8 * (3 * options.side**2)).from_buffer_copy(options.pixels.read_bytes())
    bitmap = mtmd.mtmd_bitmap_init(options.side, options.side, rgb)
    chunks = mtmd.mtmd_input_chunks_init()
    text = mtmd.mtmd_input_text()
    text.text = marker = mtmd.mtmd_default_marker()
    text.text_len, text.add_special, text.parse_special = len(marker), False, True
    bitmaps = (ctypes.c_void_p * 1)(bitmap)
    if mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1) != 0:
        raise SystemExit("llama.cpp cannot tokenize the image")
    every = [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(mtmd.mtmd_input_chunks_size(chunks))]
    (image,) = (chunk for chunk in every if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE)
    tokens = mtmd.mtmd_input_chunk_get_n_tokens(image)
    print(json.dumps({"tokens": tokens}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        if mtmd.mtmd_encode_chunk(context, image) != 0:
            raise SystemExit("llama.cpp cannot encode the image")
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
    if options.embeddings:
        values = mtmd.mtmd_get_output_embd(context)
        width = llama.llama_model_n_embd(model)
        options.embeddings.write_bytes(ctypes.string_at(values, 4 * tokens * width))


if __name__ == "__main__":
    main()
