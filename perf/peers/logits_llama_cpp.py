"""Write the logits of llama.cpp or ik_llama.cpp at every position of a text, for `fidelity.py`.

usage: PYTHON perf/peers/logits_llama_cpp.py MODEL OUT < tokens.json

PYTHON is a Python interpreter with llama-cpp-python or ik-llama-cpp-python. MODEL is a GGUF file, and standard input a
JSON list of T token ids. OUT is a file in NumPy's format, float32 [T, vocabulary].
"""

import json
import sys

import numpy as np

try:
    import llama_cpp as llama  # pyright: ignore[reportMissingImports]  # only PYTHON has one of the two
except ImportError:
    import ik_llama_cpp._ctypes_api as llama  # pyright: ignore[reportMissingImports]


def main() -> None:
    path, out = sys.argv[1:]
    tokens = json.load(sys.stdin)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = max(len(tokens), 512)
    parameters.n_ubatch = 512
    context = llama.llama_init_from_model(model, parameters)
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    if llama.llama_decode(context, batch) != 0:
        raise SystemExit("llama.cpp could not run the batch")
    rows = [np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (size,)) for i in range(len(tokens))]
    np.save(out, np.stack(rows).astype(np.float32))


if __name__ == "__main__":
    main()
