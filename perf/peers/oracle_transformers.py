"""Generate greedy tokens with transformers in float32, as an oracle of `agreement.py`.

usage: PYTHON perf/peers/oracle_transformers.py FOLDER STEPS < prompts.json

PYTHON is a Python interpreter with transformers. FOLDER contains `config.json` and safetensors files. Input and output
have the format of `oracle_llama_cpp.py`. If FOLDER contains no tokenizer, a prompt is the beginning-of-sequence id and
one random id for each word of the text. The script truncates prompts that do not fit into the model's context.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Oracle:
    """A model that transformers has loaded in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._config = self._model.config.get_text_config()
        has_tokenizer = (folder / "tokenizer.json").exists()
        self._tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None

    def tokenize(self, text: str, steps: int) -> list[int]:
        """Return the token ids of a text, including the special tokens at the beginning.

        The ids are truncated so that `steps` more tokens fit into the model's context.
        """
        if self._tokenizer is not None:
            ids = self._tokenizer(text).input_ids
        else:
            ordinary = range(self._config.vocab_size // 8, self._config.vocab_size // 2)
            ids = [self._config.bos_token_id, *random.Random(text).choices(ordinary, k=len(text.split()))]
        return ids[: self._config.max_position_embeddings - steps]

    @torch.inference_mode()
    def follow(self, prompt: list[int], steps: int) -> dict[str, Any]:
        """Generate at most `steps` tokens greedily after the token ids `prompt`. Return the output line."""
        line: dict[str, Any] = {"prompt": prompt, "tokens": [], "best": [], "gap": []}
        ids, cache = torch.tensor([prompt]), None
        for _ in range(steps):
            output = self._model(ids, past_key_values=cache, use_cache=True)
            logprobs, best = output.logits[0, -1].log_softmax(-1).topk(2)
            line["tokens"].append(int(best[0]))
            line["best"].append(best.tolist())
            line["gap"].append(float(logprobs[0] - logprobs[1]))
            ids, cache = best[:1].view(1, 1), output.past_key_values
        return line


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    oracle = Oracle(folder)
    for text in json.load(sys.stdin):
        print(json.dumps(oracle.follow(oracle.tokenize(text, steps), steps)), flush=True)


if __name__ == "__main__":
    main()
