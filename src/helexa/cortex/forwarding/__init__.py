"""Communication with nodes: forwards generation requests, calls other endpoints, and waits for model loads."""
