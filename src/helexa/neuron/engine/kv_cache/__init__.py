"""KV pages and state slots: allocation and prefix reuse."""
