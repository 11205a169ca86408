"""Generate greedy tokens with llama.cpp (through xllamacpp), as an oracle of `agreement.py`.

usage: PYTHON perf/peers/oracle_llama_cpp.py MODEL STEPS < prompts.json

PYTHON is a Python interpreter with xllamacpp; no other package is needed. MODEL is a GGUF file. Standard input is a
JSON list of texts. The script prints a JSON line for each text, with these keys:

    prompt      token ids of the text
    tokens      ids of the generated tokens; fewer than STEPS if the model ends its text
    best        ids of the two best tokens at each generated position
    gap         logprob difference of the two best tokens at each generated position
"""

import json
import sys
import urllib.request
from typing import Any

import xllamacpp  # pyright: ignore[reportMissingImports]  # only PYTHON has it


class Oracle:
    """A model that llama.cpp has loaded."""

    def __init__(self, model: str) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = model
        parameters.n_ctx, parameters.n_parallel = 2048, 1
        parameters.cache_prompt = parameters.warmup = False
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.verbosity = -1
        self._server = xllamacpp.Server(parameters)

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, including the special tokens that the model expects at the beginning."""
        body = json.dumps({"content": text, "add_special": True}).encode()
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)["tokens"]

    def follow(self, prompt: list[int], steps: int) -> dict[str, Any]:
        """Generate at most `steps` tokens greedily after the token ids `prompt`. Return the output line."""
        request = {"prompt": prompt, "max_tokens": steps, "temperature": 0, "logprobs": 2}
        places = self._server.handle_completions(request)["choices"][0]["logprobs"]["content"]
        tops = [place["top_logprobs"] for place in places]
        return {
            "prompt": prompt,
            "tokens": [place["id"] for place in places],
            "best": [[top["id"] for top in two] for two in tops],
            "gap": [two[0]["logprob"] - two[1]["logprob"] for two in tops],
        }


def main() -> None:
    model, steps = sys.argv[1:]
    oracle = Oracle(model)
    for text in json.load(sys.stdin):
        print(json.dumps(oracle.follow(oracle.tokenize(text), int(steps))), flush=True)


if __name__ == "__main__":
    main()
