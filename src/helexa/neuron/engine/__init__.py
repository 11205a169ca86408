"""Inference engine behind an IPC protocol: scheduler, KV cache, steps, sampling."""
