"""Model files: read and validate weights, and quantize them during loading.

`gguf` reads headers without torch, and `quant_form` and `quant_policy` do not import torch, so the server process can
use them. The other modules return tensors.
"""
