"""Communication with nodes: the proxy for generation requests, other calls, and the wait for model loads."""
