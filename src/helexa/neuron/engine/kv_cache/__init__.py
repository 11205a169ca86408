"""The KV cache's bookkeeping: allocation and prefix reuse of KV pages and state slots."""
