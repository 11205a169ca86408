"""Measure transformers in bfloat16 on the benchmark rows of `engine.py`, as JSON lines.

usage: python perf/peers/peer_transformers.py FOLDER [--rows decode@1,prefill@512] [--threads 2]

FOLDER is a checkpoint, for example from `perf/random_model.py`. The measured time contains only the forward passes,
without a sampler, which is an advantage for transformers.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1]))
from support.rows import DECODE_STEPS, Row, measure_rows, parser, prompt


class Model:
    """A checkpoint that transformers has loaded."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def measure(self, row: Row) -> tuple[float, float]:
        """Run the prompts of a row and then its decode steps, and return both durations in seconds."""
        if row.sampled:
            raise RuntimeError("this script measures transformers without a sampler")
        prompts = torch.tensor([prompt(row.context) for _ in range(max(row.sequences, 1))])
        begin = time.perf_counter()
        cache = self._model(prompts, use_cache=True, logits_to_keep=1).past_key_values
        prefilled = time.perf_counter()
        if row.sequences:
            for token in torch.tensor(prompt(DECODE_STEPS)):
                self._model(token.expand(row.sequences, 1), past_key_values=cache, use_cache=True)
        return prefilled - begin, time.perf_counter() - prefilled


def main() -> None:
    arguments = parser(__doc__).parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = Model(arguments.model)
    model.measure(Row.parse("decode@1"))  # warm up
    measure_rows("transformers", arguments.rows, model.measure)


if __name__ == "__main__":
    main()
