"""Measure OpenVINO GenAI with continuous batching on the benchmark rows of `engine.py`, as JSON lines.

usage: PYTHON perf/peers/peer_openvino.py MODEL [--rows decode@1,decode@1:7700,prefill@512] [--threads 2]

PYTHON is a Python interpreter with openvino-genai; no other package is needed. MODEL is a GGUF file. The script uses
the default settings of OpenVINO GenAI, but without its prefix cache. The library generates an answer in one call. The
time of a decode row is therefore the time of 1 + 64 tokens minus the time of one token, for prompts of the same number
and length.
"""

import sys
import time
from pathlib import Path

import numpy
import openvino  # pyright: ignore[reportMissingImports]  # only PYTHON has it
import openvino_genai  # pyright: ignore[reportMissingImports]  # only PYTHON has it

sys.path.append(str(Path(__file__).parents[1]))
from support.rows import DECODE_STEPS, Row, measure_rows, parser, prompt

CACHE_GIB = 1


class Pipeline:
    """A model that OpenVINO GenAI has loaded."""

    def __init__(self, model: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GIB, False
        properties = {"INFERENCE_NUM_THREADS": threads} if threads else {}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def decode(self, row: Row) -> float:
        """Run the decode steps of a benchmark row, and return their duration in seconds."""
        first = self._generate(row.sequences, row.context, 1)
        return self._generate(row.sequences, row.context, 1 + DECODE_STEPS) - first

    def prefill(self, row: Row) -> float:
        """Prefill the prompt of a benchmark row, and return the seconds until the first output token."""
        return self._generate(1, row.context, 1)

    def _generate(self, sequences: int, length: int, tokens: int) -> float:
        prompts = [openvino.Tensor(numpy.array([prompt(length)], dtype=numpy.int64)) for _ in range(sequences)]
        greedy = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        begin = time.perf_counter()
        results = self._pipeline.generate(prompts, [greedy] * sequences)
        seconds = time.perf_counter() - begin
        generated = [len(result.m_generation_ids[0]) for result in results]
        if generated != [tokens] * sequences:
            raise RuntimeError(f"OpenVINO made {generated} tokens where {tokens} were asked of each sequence")
        return seconds


def main() -> None:
    arguments = parser(__doc__).parse_args()
    pipeline = Pipeline(arguments.model, arguments.threads)
    pipeline.decode(Row.parse("decode@1"))  # warm up
    measure_rows("openvino", arguments.rows, pipeline.decode, pipeline.prefill)


if __name__ == "__main__":
    main()
