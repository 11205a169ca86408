"""Measure OpenVINO GenAI with continuous batching on the benchmark rows of `engine.py`, as JSON lines.

usage: PYTHON perf/peers/peer_openvino.py MODEL [--rows decode@1,sampled@4,prefill@512] [--threads 2]

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
from support.rows import DECODE_STEPS, TEMPERATURE, TOP_K, TOP_P, Row, measure_rows, parser, prompt

CACHE_GIB = 1


class Pipeline:
    """A model that OpenVINO GenAI has loaded."""

    def __init__(self, model: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GIB, False
        properties = {"INFERENCE_NUM_THREADS": threads} if threads else {}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def measure(self, row: Row) -> tuple[float, float]:
        """Run the prompts of a row and then its decode steps, and return both durations in seconds."""
        first = self._generate(row, 1)
        return first, self._generate(row, 1 + DECODE_STEPS) - first if row.sequences else 0.0

    def _generate(self, row: Row, tokens: int) -> float:
        sequences = max(row.sequences, 1)
        prompts = [openvino.Tensor(numpy.array([prompt(row.context)], dtype=numpy.int64)) for _ in range(sequences)]
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=row.sampled)
        if row.sampled:
            config.temperature, config.top_p, config.top_k = TEMPERATURE, TOP_P, TOP_K
        begin = time.perf_counter()
        results = self._pipeline.generate(prompts, [config] * sequences)
        seconds = time.perf_counter() - begin
        generated = [len(result.m_generation_ids[0]) for result in results]
        if generated != [tokens] * sequences:
            raise RuntimeError(f"OpenVINO made {generated} tokens where {tokens} were asked of each sequence")
        return seconds


def main() -> None:
    arguments = parser(__doc__).parse_args()
    pipeline = Pipeline(arguments.model, arguments.threads)
    pipeline.measure(Row.parse("decode@1"))  # warm up
    measure_rows("openvino", arguments.rows, pipeline.measure)


if __name__ == "__main__":
    main()
