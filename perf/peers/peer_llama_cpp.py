"""Measure llama.cpp or its fork ik_llama.cpp on the benchmark rows of `engine.py`, as JSON lines.

usage: PYTHON perf/peers/peer_llama_cpp.py MODEL [--rows decode@1,sampled@4,prefill@512] [--threads 2]

PYTHON is a Python interpreter with llama-cpp-python or ik-llama-cpp-python; no other package is needed. MODEL is a GGUF
file. The script uses the default settings of both libraries, which include flash attention, except for the context size
and a KV cache that all sequences share. ik_llama.cpp runs in its fastest mode, with repacked weights, and without flash
attention in rows of several sequences, in which its flash attention aborts. In the rows `decode@B`, the measured time
contains only calls of `llama_decode` with given tokens, without a sampler, which is an advantage for both. In the rows
`sampled@B`, it also contains the library's samplers for each token.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

try:
    import llama_cpp as llama  # pyright: ignore[reportMissingImports]  # PYTHON has one of the two

    IK = False
except ImportError:
    import ik_llama_cpp._ctypes_api as llama  # pyright: ignore[reportMissingImports]

    IK = True

sys.path.append(str(Path(__file__).parents[1]))
from support.rows import DECODE_STEPS, TEMPERATURE, TOP_K, TOP_P, Row, measure_rows, parser, prompt

BATCH = 512


class Model:
    """A model that llama.cpp has loaded, with a context (KV cache) that is large enough for all rows."""

    def __init__(self, model: str, rows: list[Row], threads: int) -> None:
        llama.llama_backend_init()
        model_parameters = llama.llama_model_default_params()
        if IK:
            model_parameters.repack_tensors = True
        self._model = llama.llama_model_load_from_file(model.encode(), model_parameters)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        self._parameters = llama.llama_context_default_params()
        self._parameters.n_ctx = max(4096, *(row.positions for row in rows))
        self._parameters.n_batch = self._parameters.n_ubatch = BATCH
        self._parameters.n_seq_max = max(1, *(row.sequences for row in rows))
        if not IK:
            self._parameters.kv_unified = True
        if threads:
            self._parameters.n_threads = self._parameters.n_threads_batch = threads
        self._context = None
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        self._token_ids = np.arange(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model)))
        fields = [("id", np.int32), ("logit", np.float32), ("p", np.float32)]  # of ik_llama.cpp's `llama_token_data`
        self._tokens = np.zeros(len(self._token_ids), np.dtype(fields))

    def measure(self, row: Row) -> tuple[float, float]:
        """Run the prompts of a row and then its decode steps, and return both durations in seconds."""
        run_prompts, run_step = self.parts(row)
        begin = time.perf_counter()
        run_prompts()
        prefilled = time.perf_counter()
        for _ in range(DECODE_STEPS if row.sequences else 0):
            run_step()
        return prefilled - begin, time.perf_counter() - prefilled

    def parts(self, row: Row) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return a function that runs the prompts of a row, and a function that runs its next decode step.

        At most `DECODE_STEPS` steps can run.
        """
        self._prepare_context(row)
        sequences = range(row.sequences)
        prompts = [prompt(row.context) for _ in sequences or [0]]
        samplers = [self._sampler(sequence) for sequence in sequences] if row.sampled else []
        tokens = [prompt(DECODE_STEPS) for _ in sequences]
        numbers = iter(range(DECODE_STEPS))

        def run_prompts() -> None:
            for sequence, ids in enumerate(prompts):
                self._prefill(ids, sequence)

        def run_step() -> None:
            step = next(numbers)
            self._run([(tokens[sequence][step], row.context + step, sequence, True) for sequence in sequences])
            for sequence, sample in enumerate(samplers):  # the sampled token is the next step's input
                tokens[sequence][min(step + 1, DECODE_STEPS - 1)] = sample()

        return run_prompts, run_step

    def _prefill(self, tokens: list[int], sequence: int) -> None:
        last = len(tokens) - 1
        for start in range(0, len(tokens), BATCH):
            chunk = enumerate(tokens[start : start + BATCH], start)
            self._run([(token, position, sequence, position == last) for position, token in chunk])

    def _sampler(self, index: int) -> Callable[[], int]:
        """Return a function that samples a token from row `index` of the logits of the latest batch."""
        if IK:
            return lambda: self._ik_sample(index)
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_k(TOP_K))
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_p(TOP_P, 1))
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(TEMPERATURE))
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(index))
        return lambda: llama.llama_sampler_sample(chain, self._context, index)

    def _ik_sample(self, index: int) -> int:
        """Sample with the functions of ik_llama.cpp, which take an array of all tokens and their logits."""
        tokens = self._tokens
        tokens["id"] = self._token_ids
        tokens["logit"] = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, index), (len(tokens),))
        data = ctypes.cast(tokens.ctypes.data, ctypes.POINTER(llama.llama_token_data))
        candidates = llama.llama_token_data_array(data, len(tokens), -1, False)
        pointer = ctypes.byref(candidates)
        llama.llama_sample_top_k(self._context, pointer, TOP_K, 1)
        llama.llama_sample_top_p(self._context, pointer, TOP_P, 1)
        llama.llama_sample_temp(self._context, pointer, TEMPERATURE)
        return llama.llama_sample_token(self._context, pointer)

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

    def _prepare_context(self, row: Row) -> None:
        """Clear the context, or make a new one if a row needs other settings than the row before."""
        if IK:
            flash = row.sequences <= 1  # with several sequences, an assertion fails (S > 0 in iqk_fa_templates.h)
            if self._context and flash == self._parameters.flash_attn:
                llama.llama_kv_cache_clear(self._context)
                return
            self._parameters.flash_attn = flash
        elif self._context:
            llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
            return
        if self._context:
            llama.llama_free(self._context)
        self._context = llama.llama_init_from_model(self._model, self._parameters)
        if not self._context:
            raise SystemExit(f"llama.cpp has no room for {self._parameters.n_ctx} positions")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    if not Path(arguments.model).is_file():
        raise SystemExit(f"{arguments.model} is no file")
    model = Model(arguments.model, arguments.rows, arguments.threads)
    model.measure(Row.parse("decode@1"))  # warm up
    measure_rows("ik_llama.cpp" if IK else "llama.cpp", arguments.rows, model.measure)


if __name__ == "__main__":
    main()
