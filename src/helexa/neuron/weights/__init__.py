"""Model files: reading, validating and repacking weights.

`gguf` and `gguf_config` read headers without torch, and `quant_form` and `quant_policy` need none, so the server
process may use them; the rest yields tensors.
"""
