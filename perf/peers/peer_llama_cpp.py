"""Measure llama.cpp or its fork ik_llama.cpp on the benchmark rows of `engine.py`, as JSON lines.

usage: PYTHON perf/peers/peer_llama_cpp.py MODEL [--rows decode@1,decode@1:7700,prefill@512] [--threads 2]

PYTHON is a Python interpreter with llama-cpp-python or ik-llama-cpp-python; no other package is needed. MODEL is a GGUF
file. The script uses llama.cpp's default settings, except for the context size and a KV cache that all sequences share.
ik_llama.cpp runs in its fastest mode, with repacked weights, and without flash attention, which aborts with several
sequences. The measured time contains only calls of `llama_decode` with given tokens, without a sampler, which is an
advantage for both.
"""

import sys
import time
from pathlib import Path

try:
    import llama_cpp as llama  # pyright: ignore[reportMissingImports]  # PYTHON has one of the two

    IK = False
except ImportError:
    import ik_llama_cpp._ctypes_api as llama  # pyright: ignore[reportMissingImports]

    IK = True

sys.path.append(str(Path(__file__).parents[1]))
from support.rows import DECODE_STEPS, Row, measure_rows, parser, prompt

BATCH = 512


class Context:
    """A model that llama.cpp has loaded, with a context (KV cache) that is large enough for all rows."""

    def __init__(self, model: str, rows: list[Row], threads: int) -> None:
        llama.llama_backend_init()
        model_parameters = llama.llama_model_default_params()
        if IK:
            model_parameters.repack_tensors = True
        self._model = llama.llama_model_load_from_file(model.encode(), model_parameters)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = max(4096, *(row.positions for row in rows))
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_seq_max = max(1, *(row.sequences for row in rows))
        if IK:
            parameters.flash_attn = False
        else:
            parameters.kv_unified = True
        if threads:
            parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise SystemExit(f"llama.cpp has no room for {parameters.n_ctx} positions")
        self._batch = llama.llama_batch_init(BATCH, 0, 1)

    def decode(self, row: Row) -> float:
        """Run the decode steps of a benchmark row, and return their duration in seconds."""
        self._clear()
        for sequence in range(row.sequences):
            self._prefill(prompt(row.context), sequence)
        tokens = prompt(DECODE_STEPS)
        begin = time.perf_counter()
        for step, token in enumerate(tokens):
            self._run([(token, row.context + step, sequence, True) for sequence in range(row.sequences)])
        return time.perf_counter() - begin

    def prefill(self, row: Row) -> float:
        """Prefill the prompt of a benchmark row. Return the seconds until the logits of its last token are known."""
        self._clear()
        tokens = prompt(row.context)
        begin = time.perf_counter()
        self._prefill(tokens, 0)
        return time.perf_counter() - begin

    def _prefill(self, tokens: list[int], sequence: int) -> None:
        last = len(tokens) - 1
        for start in range(0, len(tokens), BATCH):
            chunk = enumerate(tokens[start : start + BATCH], start)
            self._run([(token, position, sequence, position == last) for position, token in chunk])

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Run one batch. An entry is a token id, its position, its sequence, and whether its logits are needed."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp could not run a batch")
        if not IK:  # its `llama_decode` returns after the computation
            llama.llama_synchronize(self._context)

    def _clear(self) -> None:
        if IK:
            llama.llama_kv_cache_clear(self._context)
        else:
            llama.llama_memory_clear(llama.llama_get_memory(self._context), True)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    if not Path(arguments.model).is_file():
        raise SystemExit(f"{arguments.model} is no file")
    context = Context(arguments.model, arguments.rows, arguments.threads)
    context.decode(Row.parse("decode@1"))  # warm up
    measure_rows("ik_llama.cpp" if IK else "llama.cpp", arguments.rows, context.decode, context.prefill)


if __name__ == "__main__":
    main()
