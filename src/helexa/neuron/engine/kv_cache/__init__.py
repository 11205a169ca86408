"""The bookkeeping of the KV cache: allocates KV pages and state slots, and reuses them for common prefixes."""
