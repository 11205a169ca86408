"""Model files: read and validate weights, and quantize them during loading.

The server process, which handles HTTP requests, does not import torch. It uses only the modules of this package that
work without torch, such as the readers of GGUF headers in `gguf`, `quantization_formats` and `vision_config`.
"""
