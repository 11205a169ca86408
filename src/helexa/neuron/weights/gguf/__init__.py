"""GGUF files: headers, configuration and tensors."""
