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
    def decode(self, row: Row) -> float:
        """Run the decode steps of a benchmark row, and return their duration in seconds."""
        prompts = torch.tensor([prompt(row.context) for _ in range(row.sequences)])
        cache = self._model(prompts, use_cache=True, logits_to_keep=1).past_key_values
        tokens = torch.tensor(prompt(DECODE_STEPS))
        begin = time.perf_counter()
        for token in tokens:
            self._model(token.expand(row.sequences, 1), past_key_values=cache, use_cache=True)
        return time.perf_counter() - begin

    @torch.inference_mode()
    def prefill(self, row: Row) -> float:
        """Prefill the prompt of a benchmark row. Return the seconds until the logits of its last token are known."""
        tokens = torch.tensor([prompt(row.context)])
        begin = time.perf_counter()
        self._model(tokens, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begin


def main() -> None:
    arguments = parser(__doc__).parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = Model(arguments.model)
    model.decode(Row.parse("decode@1"))  # warm up
    measure_rows("transformers", arguments.rows, model.decode, model.prefill)


if __name__ == "__main__":
    main()
