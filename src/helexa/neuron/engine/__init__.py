"""The inference engine: scheduler, KV cache, steps, sampler and model execution, behind an IPC protocol."""
