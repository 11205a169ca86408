"""Model files: read and validate weights, and quantize them during loading.

The server process does not import torch. It uses only the modules here that work without torch: the readers of GGUF
headers in `gguf`, and `quant_form` and `quant_policy`. The other modules return tensors.
"""
