"""Readers of GGUF files: headers, model configuration and tensors."""
