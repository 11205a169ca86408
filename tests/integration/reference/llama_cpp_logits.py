"""Write llama.cpp's logits at every position of several texts. llama.cpp ends its process when an assertion fails.

usage: python llama_cpp_logits.py LIBRARY MODEL OUT < texts.json

LIBRARY is a shared library that exports llama.cpp's C functions. MODEL is a GGUF file, and standard input a JSON list
of lists of token ids. OUT gets one array for each text, in NumPy's format: float32 [T, vocabulary].
"""

import ctypes
import json
import sys
from ctypes import POINTER, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from typing import ClassVar

import numpy as np

F32, F16 = 0, 1  # values of `enum ggml_type`
CONTEXT = 512


class _Opaque(ctypes.Structure):
    """A structure larger than `llama_model_params`. The program passes llama.cpp's default values and changes none."""

    _fields_: ClassVar = [("content", ctypes.c_uint64 * 64)]


class _ContextParameters(ctypes.Structure):
    """`llama_context_params`, up to the last field that this program changes."""

    _fields_: ClassVar = [
        *[(name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")],
        *[(name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")],
        *[(name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")],
        *[(name, c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")],
        *[(name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")],
        *[("yarn_beta_fast", c_float), ("yarn_beta_slow", c_float), ("yarn_orig_ctx", c_uint32), ("defrag", c_float)],
        *[("cb_eval", c_void_p), ("cb_eval_user_data", c_void_p), ("type_k", c_int32), ("type_v", c_int32)],
        ("rest", ctypes.c_uint64 * 32),
    ]


class _Batch(ctypes.Structure):
    _fields_: ClassVar = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


def main() -> None:
    library, path, out = sys.argv[1:]
    llama = ctypes.CDLL(library)
    for name, result, arguments in (
        ("llama_model_default_params", _Opaque, []),
        ("llama_model_load_from_file", c_void_p, [c_char_p, _Opaque]),
        ("llama_context_default_params", _ContextParameters, []),
        ("llama_init_from_model", c_void_p, [c_void_p, _ContextParameters]),
        ("llama_model_get_vocab", c_void_p, [c_void_p]),
        ("llama_vocab_n_tokens", c_int32, [c_void_p]),
        ("llama_get_memory", c_void_p, [c_void_p]),
        ("llama_memory_clear", None, [c_void_p, ctypes.c_bool]),
        ("llama_batch_init", _Batch, [c_int32, c_int32, c_int32]),
        ("llama_decode", c_int32, [c_void_p, _Batch]),
        ("llama_get_logits_ith", POINTER(c_float), [c_void_p, c_int32]),
    ):
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    parameters = llama.llama_context_default_params()
    # Default values: the fields above are at the places that the library expects.
    assert (parameters.n_ctx, parameters.n_seq_max, parameters.flash_attn_type) == (512, 1, -1)
    assert (parameters.yarn_ext_factor, parameters.type_k, parameters.type_v) == (-1, F16, F16)
    # Without these changes, llama.cpp would round keys and values to 16 bits.
    parameters.type_k = parameters.type_v = F32
    parameters.flash_attn_type = 0
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = CONTEXT
    parameters.n_threads = parameters.n_threads_batch = 1
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise SystemExit("llama.cpp has created no context")
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    logits = []
    for tokens in json.load(sys.stdin):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
        if llama.llama_decode(context, batch) != 0:
            raise SystemExit("llama.cpp could not run the batch")
        rows = [np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (size,)) for i in range(len(tokens))]
        logits.append(np.stack(rows))
    np.savez(out, *logits)


if __name__ == "__main__":
    main()
