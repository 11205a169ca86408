"""Bookkeeping of the KV cache: allocates KV pages and state slots, and finds cached pages of common prefixes."""
