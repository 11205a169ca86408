"""Model files: reading, validating and repacking weights.

`gguf` and `gguf_config` read headers without torch, so the server process may use them; the rest yields tensors.
"""
